"""llama.cpp's server as a system under test; a stand-in on a real socket takes its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.speed.config import parsed
from bench.systems.llama_cpp import LlamaServer, launches, server_options
from bench.systems.program import ROOT
from bench.systems.system import Load, NotServingError
from testing.processes import alive
from tests.bench.systems.stand_in_llama_server import program

LOAD = Load([[5, 6, 7, 8], [9, 8, 7]], 12, 0.8)


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    return program(tmp_path)


def gguf(folder: Path, word: str) -> Path:
    """Write a model with the behavior `word`."""
    file = folder / "model.gguf"
    file.write_text(word)
    return file


def asked(model: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in model.with_suffix(".asked").read_text().splitlines()]


def test_a_load_is_asked_as_documented_and_told_as_it_comes(binary: Path, tmp_path: Path) -> None:
    model = gguf(tmp_path, "slow")
    with LlamaServer.start(binary, model, None, server_options("none", 2, 64)) as server:
        assert server.about["versions"] == {"llama.cpp": "stand-in"}
        assert str(tmp_path) not in json.dumps(server.about)  # no local paths in published reports
        answer = server.run(LOAD)
    assert (answer.tokens, answer.steps) == (24, 24)
    assert [len(stream) for stream in answer.arrivals] == [12, 12]
    for stream in answer.arrivals:
        times = [when for when, _ in stream]
        assert times == sorted(times)
        assert 0 < times[0] <= times[-1] <= answer.seconds
    requests = sorted(asked(model), key=lambda each: int(each["seed"]))
    assert [each["prompt"] for each in requests] == LOAD.prompts
    expected = {"n_predict": 12, "temperature": 0.8, "ignore_eos": True, "cache_prompt": False, "stream": True}
    for each in requests:
        assert expected.items() <= each.items()


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_steps_are_those_of_the_target(binary: Path, tmp_path: Path, speculation: str) -> None:
    model = gguf(tmp_path, "fine")
    draft = model if speculation == "draft" else None
    with LlamaServer.start(binary, model, draft, server_options(speculation, 2, 64)) as server:
        answer = server.run(LOAD)
    assert (answer.tokens, answer.steps) == (24, 12)


def test_what_comes_beyond_what_was_asked_is_not_counted(binary: Path, tmp_path: Path) -> None:
    with LlamaServer.start(binary, gguf(tmp_path, "chatty"), None, server_options("none", 2, 64)) as server:
        assert server.run(LOAD).tokens == 24


def test_its_process_ends_with_the_benchmark(binary: Path, tmp_path: Path) -> None:
    with LlamaServer.start(binary, gguf(tmp_path, "fine"), None, server_options("none", 1, 64)) as server:
        (pid,) = server.sessions().values()
        assert os.getsid(pid) == pid  # a session of its own, so that its CPU time can be measured
    assert server.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_its_process_ends_with_a_killed_benchmark(binary: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from bench.systems.llama_cpp import LlamaServer, server_options\n"
        "given = Path(sys.argv[1]), Path(sys.argv[2]), None, server_options('none', 1, 64)\n"
        "with LlamaServer.start(*given) as server: print(server.process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(binary), str(gguf(tmp_path, "fine"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert alive(pid)
        benchmark.kill()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def test_a_server_that_does_not_come_up_is_one_line(binary: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(NotServingError, match=r"^llama-server ended: error: failed to load the model$"),
        LlamaServer.start(binary, gguf(tmp_path, "broken"), None, server_options("none", 1, 64)),
    ):
        pass


def test_a_server_that_cannot_guess_so_says_so(binary: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(NotServingError, match=r"^llama-server ended: .* unknown speculative type telepathy$"),
        LlamaServer.start(binary, gguf(tmp_path, "fine"), None, ["--spec-type", "telepathy"]),
    ):
        pass


def test_a_stream_that_breaks_off_is_one_line(binary: Path, tmp_path: Path) -> None:
    with (
        LlamaServer.start(binary, gguf(tmp_path, "torn"), None, server_options("none", 2, 64)) as server,
        pytest.raises(NotServingError, match=r"^its answer broke off$"),
    ):
        server.run(LOAD)


def test_a_refused_prompt_is_one_line(binary: Path, tmp_path: Path) -> None:
    with (
        LlamaServer.start(binary, gguf(tmp_path, "fine"), None, server_options("none", 1, 64)) as server,
        pytest.raises(NotServingError, match=r"^HTTP 400: .*Prompt contains invalid tokens"),
    ):
        server.run(Load([[999_999]], 4, 0.0))


def test_a_server_has_room_for_every_stream() -> None:
    given = server_options("draft", 16, 224)
    assert given[given.index("--parallel") + 1] == "16"
    assert int(given[given.index("--ctx-size") + 1]) >= 16 * (224 + int(given[given.index("--spec-draft-n-max") + 1]))
    assert given[given.index("--threads") + 1] == str(os.cpu_count())


def test_every_mode_of_it_is_a_configuration(binary: Path, tmp_path: Path) -> None:
    model = str(gguf(tmp_path, "fine"))
    plain, ngram = "llama.cpp", "llama.cpp n-gram"

    def names(*more: str) -> list[str]:
        config = parsed(["--llama-server", str(binary), "--llama-gguf", model, *more])
        assert config.llama is not None
        found = launches(config.setup, config.llama)
        return [configuration.name for launch in found for configuration in launch.configurations]

    assert names() == [plain, ngram]
    assert names("--llama-draft-gguf", model) == [plain, ngram, "llama.cpp drafted"]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--llama-server", "{binary}"], "--llama-server and --llama-gguf: one needs the other"),
        (["--llama-gguf", "{model}"], "--llama-server and --llama-gguf: one needs the other"),
        (["--llama-draft-gguf", "{model}"], "--llama-draft-gguf needs --llama-server and --llama-gguf"),
        (["--llama-server", "/nowhere", "--llama-gguf", "{model}"], "--llama-server: /nowhere is not a file"),
        (["--llama-server", "{model}", "--llama-gguf", "{model}"], "is not executable"),
        (["--llama-server", "{binary}", "--llama-gguf", "/nowhere"], "--llama-gguf: /nowhere is not a file"),
    ],
)
def test_paths_that_cannot_work_are_refused(
    given: list[str], what: str, binary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = gguf(tmp_path, "fine")
    with pytest.raises(SystemExit):
        parsed([each.format(binary=binary, model=model) for each in given])
    assert what in capsys.readouterr().err
