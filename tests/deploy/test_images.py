"""Images contain what their role needs and no more, run unprivileged with a read-only root, and serve.

They are built with buildah, as root, on a base made by debootstrap, with packages from this machine's pip indexes.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from deploy.images import probe
from specdec import Client
from testing.processes import alive, children_of
from tests.deploy.containers import (
    READY_SECONDS,
    Builder,
    Image,
    Mount,
    Process,
    owned,
)
from tests.deploy.dockerfiles import (
    FOLDER,
    NOBODY,
    PROBE,
    PROJECT,
    ROLES,
)


@pytest.fixture(scope="module")
def images(builder: Builder) -> dict[str, Image]:
    """Build the images, the smallest first."""
    return {role: builder.build_service(role) for role in ROLES}


INSPECTION = """
import importlib.util, json, os, pathlib, shutil, struct
def writable(folder):
    try:
        pathlib.Path(folder, "new").write_text("")
    except OSError:
        return False
    return True
folders = ["/", "/opt/specdec", "/usr/share/specdec", "/etc", "/tmp"]
site = pathlib.Path(importlib.util.find_spec("grpc").origin).parents[1]
flags = {struct.unpack("<I", each.read_bytes()[4:8])[0] for each in site.rglob("*.pyc")}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "user": [os.getuid(), os.getgid(), os.getgroups()],
    "capabilities": [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh")],
    "first": os.getpid(),
    "writable": [each for each in folders if writable(each)],
    "modules": [each for each in ("torch", "transformers", "onnxruntime", "pip", "tests", "pytest") if
                importlib.util.find_spec(each)],
    "programs": [each for each in ("pip", "gcc", "cc", "g++", "make", "git") if shutil.which(each)],
    "bytecode": sorted(flags),
    "leftover": [each for each in ("/src", "/code", "/sbom.json", "/opt/tools", "/root/.cache")
                 if os.path.exists(each)],
    "sbom": json.load(open("/usr/share/specdec/sbom.json")),
}))
"""


@pytest.mark.verify
@pytest.mark.timeout(3600)  # the first test builds the images
@pytest.mark.parametrize("role", ROLES)
def test_an_image_holds_no_more_than_it_needs(images: dict[str, Image], logs: Path, role: str) -> None:
    image = images[role]
    found = json.loads(image.output(logs, INSPECTION, entry=("python", "-c")))
    assert found["user"] == [NOBODY, NOBODY, []]
    assert found["capabilities"] == [0, 0, 0]
    assert found["first"] == 1
    assert found["writable"] == ["/tmp"]
    own = {"orchestrator": [], "draft": ["onnxruntime"], "verifier": ["torch", "transformers", "onnxruntime"]}
    assert found["modules"] == own[role]
    assert found["programs"] == []
    assert found["bytecode"] == [1]  # not validated against the source
    assert found["leftover"] == []
    sbom = found["sbom"]
    assert sbom["bomFormat"] == "CycloneDX"
    names = {canonicalize_name(each["name"]) for each in sbom["components"]}
    assert {PROJECT["name"], "grpcio", "tokenizers", "opentelemetry-sdk"} <= names
    assert ("torch" in names) == (role == "verifier")
    assert image.output(logs, "--version").strip() == PROJECT["version"]


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_the_images_serve_together(images: dict[str, Image], models: Path, logs: Path, tmp_path: Path) -> None:
    exported = owned(tmp_path / "exported")
    cache = owned(tmp_path / "cache")
    read, written = Mount(models, "/models"), Mount(exported, "/exported", "rw")
    verifier_image = images["verifier"]
    verifier_image.output(logs, "export", "/models/draft", "/exported/draft", mounts=(read, written))

    listening = ("--host", "127.0.0.1", "--port", "0")
    with ExitStack() as stack:

        def start(role: str, *arguments: str, mounts: Iterable[Mount] = ()) -> Process:
            return stack.enter_context(images[role].started(logs, *arguments, *listening, mounts=mounts))

        verifier = start(
            "verifier",
            *("verifier", "--model", "/models/target"),
            mounts=(read, Mount(cache, "/var/cache/specdec", "rw")),
        )
        draft = start("draft", "draft", "--model", "/exported/draft", mounts=(Mount(exported, "/exported"),))
        addresses = verifier.ready(), draft.ready()
        orchestrator = start(
            "orchestrator",
            *("orchestrator", "--model", "/models/target", "--workers", "2"),
            *("--verifier", addresses[0], "--draft", addresses[1]),
            mounts=(read,),
        )
        at = orchestrator.ready()
        front = start("orchestrator", "openai", "--orchestrator", at)
        http = front.ready()

        # 1. All become ready, according to their images' own probes.
        deadline = time.monotonic() + READY_SECONDS
        for role, address in (
            *zip(("verifier", "draft", "orchestrator"), (*addresses, at), strict=True),
            ("orchestrator", f"http://{http}/health"),
        ):
            while True:
                try:
                    probe.main(address)
                    break
                except SystemExit:
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            images[role].output(logs, address, entry=("python", PROBE))

        # 2. Texts by gRPC and by HTTP are equal.
        with Client(at) as client:
            expected = client.complete("Read a file.", max_tokens=32, temperature=0.7, seed=1).completions[0].text
        body = {"model": "target", "prompt": "Read a file.", "max_tokens": 32, "temperature": 0.7, "seed": 1}
        request = urllib.request.Request(
            f"http://{http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"] == expected

        # 3. The first process of a container reaps its children, and exits on SIGTERM.
        first = orchestrator.pid
        victim, _ = children_of(first)
        os.kill(victim, signal.SIGKILL)
        while Path(f"/proc/{victim}").exists() or len(children_of(first)) < 2:
            assert time.monotonic() < deadline + READY_SECONDS
            time.sleep(0.1)
        workers = children_of(first)
        assert [each.end() for each in (front, orchestrator, draft, verifier)] == [0, 0, 0, 0]
        assert not [each for each in workers if alive(each)]
        assert "cache_not" not in verifier.log.read_text()
    assert list(cache.iterdir())


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_a_warmed_image_finds_what_its_build_kept(
    builder: Builder, images: dict[str, Image], models: Path, logs: Path
) -> None:
    """The root is read-only: a start that misses anything in the cache logs that it cannot write it."""
    of_target = builder.build(
        FOLDER / "warmed.Dockerfile", "specdec-warmed", models / "target", VERIFIER="localhost/specdec-verifier"
    )
    for image, complaint in ((of_target, False), (images["verifier"], True)):
        arguments = ("verifier", "--model", "/models/target", "--host", "127.0.0.1", "--port", "0")
        with image.started(logs, *arguments, mounts=[Mount(models, "/models")]) as process:
            process.ready()
            assert process.end() == 0
            logged = process.log.read_text()
        assert ("cache_not_written" in logged) == complaint
        assert "cache_not_used" not in logged
        assert "cache_not_read" not in logged
    assert of_target.config["Env"] == images["verifier"].config["Env"]
