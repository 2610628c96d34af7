"""The chart's pods as processes: with its commands, variables, options and files, services start, find each other,
answer probes made like the kubelet's, and terminate within their grace period.

`Cluster` contains all differences from a real cluster: folders stand for volumes, 127.0.0.1 stands for all names, and
ports are any free ones."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.roles import environment
from tests.certificates import Authority
from tests.deploy.chart import (
    SMALL,
    Object,
    at,
    config,
    container,
    merged,
    models_file,
    of_kind,
    render,
    role,
    services,
    templates,
)
from tests.faults.pods import free_address
from tests.models import make, near

PATIENCE_SECONDS = 150.0
"""Timeout, long enough on a busy machine."""

LOCAL = "127.0.0.1"

SECRETS = {each: f"{each}-tls" for each in ("verifier", "draft", "orchestrator", "openai")}

VALUES = merged(
    SMALL,
    at("defaults/preStopSeconds", 0),
    at("verifiers/a/options", {"dtype": "float32", "threads": 1, "kv-tokens": 4096}),
    # The draft is not exported to ONNX, which would take long.
    at("drafts/b/options", {"engine": "torch", "dtype": "float32", "threads": 1, "kv-tokens": 4096}),
    at("openai/enabled", True),
)


@dataclass
class Pod:
    """A process that stands for a pod."""

    name: str
    template: Object
    process: subprocess.Popen[bytes]
    log: Path
    ports: Mapping[int, int]  # container port to local port

    def probe(self, name: str) -> bool:
        """Return the result of one probe, made like the kubelet's."""
        found = container(self.template)
        probe = found[name]
        named = {each["name"]: each["containerPort"] for each in found["ports"]}
        if "grpc" in probe:
            return self._health(self.ports[probe["grpc"]["port"]], probe["grpc"]["service"], probe["timeoutSeconds"])
        if "httpGet" in probe:
            asked = probe["httpGet"]
            scheme = asked.get("scheme", "HTTP").lower()
            address = f"{scheme}://{LOCAL}:{self.ports[named[asked['port']]]}{asked['path']}"
            return self._answers(address, probe["timeoutSeconds"])
        with contextlib.suppress(OSError):
            at = (LOCAL, self.ports[named[probe["tcpSocket"]["port"]]])
            socket.create_connection(at, probe["timeoutSeconds"]).close()
            return True
        return False

    def until(self, name: str, passes: bool = True) -> None:
        """Probe repeatedly until the result equals `passes`."""
        self.wait(lambda: self.probe(name) is passes, f"{name} {'passes' if passes else 'fails'}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"{self.name} ended before {what}:\n{self.said}"
            assert time.monotonic() < deadline, f"{self.name}: not {what}:\n{self.said}"
            time.sleep(0.1)

    @property
    def said(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def end(self) -> int:
        """Delete the pod like Kubernetes; return its exit status. Fails if it outlives its grace period."""
        self.process.terminate()
        return self.process.wait(self.template["spec"]["terminationGracePeriodSeconds"])

    def _health(self, port: int, service: str, seconds: float) -> bool:
        with grpc.insecure_channel(f"{LOCAL}:{port}") as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _answers(self, address: str, seconds: float) -> bool:
        anything = ssl.create_default_context()
        anything.check_hostname, anything.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(address, timeout=seconds, context=anything) as answer:
                return bool(200 <= answer.status < 400)
        except OSError:
            return False


@dataclass
class Cluster:
    """Runs pods of the chart on this machine."""

    things: list[Object]
    folder: Path
    models: Path
    secrets: Mapping[str, Path] = field(default_factory=dict)  # folders with the contents of Secrets
    ports: dict[tuple[str, int], int] = field(default_factory=dict)  # by role and number
    pods: list[Pod] = field(default_factory=list)

    def port(self, of_role: str, number: int) -> int:
        """Return the local port for a port of a role's pods."""
        return self.ports.setdefault((of_role, number), int(free_address().rpartition(":")[2]))

    def start(self, name: str, variables: Mapping[str, str] | None = None) -> Pod:
        """Start a pod from this template, and return it."""
        template = templates(self.things)[name]
        found, place = container(template), self.folder / f"{len(self.pods)}-{name.replace('/', '-')}"
        place.mkdir()
        mounts = self._mounts(template, place)
        ports = {
            each["containerPort"]: self.port(role(template), each["containerPort"]) for each in found.get("ports", ())
        }
        log = place / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(found, mounts, variables or {}),
                env=self._environment(found, mounts),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pods.append(Pod(name, template, process, log, ports))
        return self.pods[-1]

    def _mounts(self, template: Object, place: Path) -> dict[str, Path]:
        """Create folders for a pod's volumes; return them by mount path."""
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        mounts = {}
        for mount in container(template)["volumeMounts"]:
            volume, folder = volumes[mount["name"]], place / mount["name"]
            if "secret" in volume:
                folder = self.secrets[volume["secret"]["secretName"]]
            elif "persistentVolumeClaim" in volume:
                folder = self.models
            else:
                folder.mkdir()
                for key, content in self._content(volume).items():
                    (folder / key).write_text(content)
            mounts[mount["mountPath"]] = folder
        for folder in mounts.values():
            for file in folder.glob("*.yaml"):
                file.write_text(self._here(file.read_text(), mounts, role(template)))
        return mounts

    def _content(self, volume: Object) -> dict[str, str]:
        if "configMap" not in volume:
            return {}
        found: dict[str, str] = of_kind(self.things, "ConfigMap")[volume["configMap"]["name"]]["data"]
        return found

    def _command(self, found: Object, mounts: Mapping[str, Path], variables: Mapping[str, str]) -> list[str]:
        """Return a container's command; the images' entrypoint is `specdec`."""
        words = [*found.get("command", ["specdec"]), *found["args"]]
        for name, value in variables.items():
            words = [word.replace(f"$({name})", value) for word in words]
        assert not any("$(" in word for word in words), words
        return [str(Path(sys.executable).with_name(words[0])), *(self._here(word, mounts, "") for word in words[1:])]

    def _environment(self, found: Object, mounts: Mapping[str, Path]) -> dict[str, str]:
        given = {
            each["name"]: self._here(each.get("value", "what a Secret has for it"), mounts, "") for each in found["env"]
        }
        ours = environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        # Compiled code is shared with other tests.
        return ours | given | {each: os.environ[each] for each in ("SPECDEC_CACHE_DIR",) if each in given}

    def _here(self, content: str, mounts: Mapping[str, Path], of_role: str) -> str:
        """Replace paths, addresses and ports in a text by the local ones."""
        if mounts:
            places = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
            found = re.compile(rf"(?<![\w/.])({places})(?=[/\s\"']|$)")
            content = found.sub(lambda it: str(mounts[it[1]]), content)
        if of_role:
            content = re.sub(
                r"(?m)^((?:\w+-)?port): (\d+)$", lambda it: f"{it[1]}: {self.port(of_role, int(it[2]))}", content
            )
        return re.sub(
            r"specdec-(verifier|draft|orchestrator)[\w.-]*\.svc\.cluster\.local:(\d+)",
            lambda it: f"{LOCAL}:{self.port(it[1], int(it[2]))}",
            content,
        )


@contextlib.contextmanager
def cluster(values: Object, folder: Path, models: Path, secrets: Mapping[str, Path] | None = None) -> Iterator[Cluster]:
    """Yield a cluster with a release of the chart; remove everything afterwards."""
    found = Cluster(render(values), folder, models, secrets or {})
    try:
        yield found
    finally:
        for pod in found.pods:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.process.pid, signal.SIGKILL)
            pod.process.wait()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volume of models: a target, and a draft that often agrees with it."""
    folder = tmp_path_factory.mktemp("models")
    near(make("llama", folder / "target"), folder / "draft", noise=0.05)
    return folder


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Path]:
    """Folders with certificates: each role's is valid for its Service and for this machine."""
    authority, found = Authority(tmp_path / "authority"), {}
    names = {
        "verifier": "specdec-verifier-a.serving.svc.cluster.local",
        "draft": "specdec-draft-b.serving.svc.cluster.local",
        "orchestrator": "specdec-orchestrator.serving.svc.cluster.local",
        "openai": "specdec-openai.serving.svc.cluster.local",
    }
    for of_role, secret in SECRETS.items():
        certificate, key = authority.issue(of_role, names[of_role], LOCAL)
        found[secret] = folder = tmp_path / secret
        folder.mkdir()
        for name, file in (("tls.crt", certificate), ("tls.key", key), ("ca.crt", authority.file)):
            (folder / name).write_bytes(file.read_bytes())
    return found


@pytest.mark.timeout(600)
@pytest.mark.verify
@pytest.mark.parametrize("mode", ["none", "secrets"])
def test_pods_start_pass_their_probes_serve_and_end(
    mode: str, models: Path, secrets: dict[str, Path], tmp_path: Path
) -> None:
    secured: Object = {"secrets": SECRETS, "requireClientCertificates": True}
    tls = {"mode": mode} | (secured if mode == "secrets" else {})
    with cluster(merged(VALUES, {"tls": tls}), tmp_path, models, secrets) as here:
        # 1. An orchestrator without a verifier has started and is live, but is not ready.
        orchestrator = here.start("specdec-orchestrator")
        orchestrator.until("startupProbe")
        orchestrator.until("livenessProbe")
        assert not orchestrator.probe("readinessProbe")

        # 2. All pods become ready, in whatever order they start.
        others = [here.start(f"specdec-{each}") for each in ("openai", "draft-b", "verifier-a")]
        for pod in (*others, orchestrator):
            pod.until("startupProbe")
            pod.until("readinessProbe")
            pod.until("livenessProbe")
            assert b"specdec_" in scraped(pod) or role(pod.template) == "openai"

        # 3. `helm test` gets its tokens; with forced speculation, some come from the draft.
        *front, draft, verifier = others
        asked(here)
        container(templates(here.things)["specdec-test"])["args"].append("--speculation=always")
        for _ in range(10):  # the text is so short that its draft may be late
            asked(here)
            if re.search(rb"(?m)^specdec_draft_committed_tokens_total [1-9]", scraped(draft)):
                break
        else:
            pytest.fail("the draft has not taken part in any text")

        # 4. A deleted verifier stops being ready, and terminates.
        assert verifier.end() == 0, verifier.said
        assert not verifier.probe("readinessProbe")
        for pod in (*front, orchestrator, draft):
            assert pod.end() == 0, pod.said


def asked(here: Cluster) -> None:
    """Run `helm test`."""
    asking = here.start("specdec-test")
    assert asking.process.wait(PATIENCE_SECONDS) == 0, asking.said


def scraped(pod: Pod) -> bytes:
    (port,) = [each["containerPort"] for each in container(pod.template)["ports"] if each["name"] == "metrics"]
    with urllib.request.urlopen(f"http://{LOCAL}:{pod.ports[port]}/metrics", timeout=10) as answer:
        content: bytes = answer.read()
    return content


def test_a_change_of_shares_reaches_an_orchestrator_that_runs(models: Path, tmp_path: Path) -> None:
    """The models file is replaced in the mounted folder, as by the kubelet."""
    values = merged(VALUES, at("models/tiny/revisions/1/share", 95))
    with cluster(values, tmp_path, models) as here:
        orchestrator = here.start("specdec-orchestrator")
        orchestrator.until("startupProbe")
        file = orchestrator.log.parent / "models-file" / "models.yaml"
        served = yaml.safe_load(file.read_text())
        told = yaml.safe_load(models_file(render(merged(values, at("models/tiny/revisions/1/share", 40)))))
        served["models"]["tiny"]["revisions"]["1"]["share"] = told["models"]["tiny"]["revisions"]["1"]["share"]
        new = file.with_name("new")
        new.write_text(yaml.safe_dump(served))
        new.rename(file)

        def shares() -> list[Mapping[str, float]]:
            lines = [json.loads(line) for line in orchestrator.log.read_text().splitlines() if line.startswith("{")]
            return [line["shares"] for line in lines if line["event"] == "models_served"]

        orchestrator.wait(lambda: {"tiny@1": 40.0} in shares(), "shares that are new")
        assert orchestrator.end() == 0


def test_names_and_ports_of_this_test_are_those_of_the_chart() -> None:
    """No file keeps a cluster address after the replacements by `Cluster`."""
    here = Cluster(render(VALUES), Path("/nowhere"), Path("/nowhere"))
    for pod in services(here.things).values():
        content = here._here(yaml.safe_dump(config(here.things, pod)), {}, role(pod))
        assert "svc" not in content
        assert not re.search(r"\b(5005\d|8086|9090)\b", content)
    assert "svc" not in here._here(models_file(here.things), {}, "")
