"""A service's options: precedence is command line, environment, file; all are validated alike."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from specdec.cli import app
from specdec.local import DEMO
from specdec.roles import environment
from specdec.settings import Settings, check_settings, configurable, settings


def main(
    model: Annotated[Path, typer.Option(help="A directory.")],
    kv_tokens: Annotated[int | None, typer.Option(min=512, help="Tokens.")] = None,
    exact: Annotated[bool, typer.Option(help="Exact.")] = True,
    draft: Annotated[list[str] | None, typer.Option(help="Addresses.")] = None,
    port: Annotated[int, typer.Option(help="Port.")] = 50051,
    share_port: Annotated[bool, typer.Option(hidden=True)] = False,
    window: Annotated[tuple[int, int] | None, typer.Option(help="Two words.")] = None,
) -> None:
    """Serve."""
    found = settings()
    assert found is not None
    print(json.dumps(found._replace(values={name: str(value) for name, value in found.values.items()})))


def run(arguments: str = "", file: Path | None = None, **variables: str) -> Any:
    """Run the command; return its Settings, or the error."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(configurable("verifier", main))
    words = arguments.split() + ([] if file is None else ["--config", str(file)])
    done = CliRunner().invoke(app, words, env={f"SPECDEC_VERIFIER_{name}": value for name, value in variables.items()})
    if done.exit_code:
        assert done.exit_code == 2, done.output
        return done.stderr.splitlines()[-1]
    return Settings(*json.loads(done.stdout))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "verifier.yaml"


def test_what_is_nearer_wins(file: Path) -> None:
    file.write_text("model: /filed\nkv-tokens: 600\nexact: false\ndraft: [a:1, b:2]\n")
    found = run("--model /typed", file, KV_TOKENS="700", PORT="1")
    assert found.values == {
        "model": "/typed",
        "kv_tokens": "700",
        "exact": "False",
        "draft": "['a:1', 'b:2']",
        "port": "1",
        "share_port": "False",
        "window": "None",
    }
    assert found.sources == {
        "model": "command line",
        "kv_tokens": "environment",
        "port": "environment",
        "exact": str(file),
        "draft": str(file),
    }
    assert found.unknown == []


def test_the_environment_alone_suffices(file: Path) -> None:
    file.write_text("kv_tokens: 600")
    found = run(MODEL="/m", EXACT="no", DRAFT="a:1 b:2", CONFIG=str(file))
    assert (found.values["exact"], found.values["draft"]) == ("False", "['a:1', 'b:2']")
    assert found.sources["kv_tokens"] == str(file)


@pytest.mark.parametrize("content", ["window: 5 3", "window: [5, 3]", "window: '5 3'"])
def test_an_option_of_several_words_is_one_setting(file: Path, content: str) -> None:
    file.write_text(content)
    for found in (run("--model /m", file), run("--model /m", WINDOW="5 3"), run("--model /m --window 5 3")):
        assert found.values["window"] == "(5, 3)"
    assert "'SPECDEC_VERIFIER_WINDOW'" in run("--model /m", WINDOW="5")


def test_an_empty_variable_is_none_and_an_empty_file_says_nothing(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert run("--model /m", file, KV_TOKENS="").sources == {"model": "command line"}


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting() -> None:
    links = {
        "PORT": "tcp://10.0.0.1:50051",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "50051",
        "SERVICE_PORT_GRPC": "50051",
        "PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    found = run("--model /m", None, **links)
    assert (found.values["port"], found.unknown) == ("50051", [])


@pytest.mark.parametrize("written", ["off", "'off'"])
def test_off_is_a_word_except_for_a_switch(file: Path, written: str) -> None:
    """YAML would read `off` as false."""

    def serve(
        store: Annotated[str, typer.Option()] = "memory",
        mode: Annotated[Literal["auto", "off"], typer.Option()] = "auto",
        exact: Annotated[bool, typer.Option()] = True,
    ) -> None:
        print(store, mode, exact)

    file.write_text(f"store: {written}\nmode: {written}\nexact: {written}\n")
    app = typer.Typer(add_completion=False)
    app.command()(configurable("openai", serve))
    assert CliRunner().invoke(app, ["--config", str(file)]).stdout == "off off False\n"


@pytest.mark.parametrize("written", ["3.10", "0777", "2026-11-30", "yes", "1e3"])
def test_a_value_is_taken_as_it_is_spelled(file: Path, written: str) -> None:
    file.write_text(f"model: {written}\n")
    assert run("", file).values["model"] == written


def test_a_variable_of_a_wrong_name_is_told() -> None:
    assert run("--model /m", KVTOKENS="600", SHARE_PORT="true").unknown == [
        "SPECDEC_VERIFIER_KVTOKENS (did you mean SPECDEC_VERIFIER_KV_TOKENS?)",
        "SPECDEC_VERIFIER_SHARE_PORT",
    ]


def test_a_variable_of_no_service_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_LOG_LEVEL", "loud")
    assert run("--model /m").unknown == ["SPECDEC_LOG_LEVEL"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("kv-tokens: 3", "'kv-tokens in FILE': Input should be greater than or equal to 512, is '3'"),
        ("kvtokens: 600", "'--config' FILE: kvtokens is not an option of this service (did you mean kv-tokens?)"),
        ("share-port: true", "'--config' FILE: share-port is not an option of this service"),
        ("config: other.yaml", "'--config' FILE: config is not an option of this service"),
        ("kv-tokens: 600\nkv-tokens: 700", "kv-tokens is given twice"),
        ("kv-tokens: 600\nkv_tokens: 700", "kv-tokens is given twice, with - and with _"),
        ("kv-tokens: [600]", "'--config' FILE: kv-tokens must be one value, is ['600']"),
        ("draft: [[a]]", "draft must be one value"),
        ("model:", "model must be one value, is None"),
        ("- model", "must be a mapping of options, such as log-level: debug"),
        ("model: [", "'--config' FILE: "),
        ("model: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_refused(file: Path, content: str, says: str) -> None:
    file.write_text(content)
    assert says.replace("FILE", str(file)) in run("--model /m", file)


def test_wrong_values_and_files_are_named(file: Path) -> None:
    assert "'SPECDEC_VERIFIER_KV_TOKENS': Input should be" in run("--model /m", KV_TOKENS="3")
    assert "'--config'" in run("--model /m", file)
    assert f"'SPECDEC_VERIFIER_CONFIG' {file}: No such file" in run("--model /m", CONFIG=str(file))
    assert f"'--config' {file.parent}: Is a directory" in run("--model /m", file.parent)
    assert "'--model'" in run()
    file.write_bytes(b"model: \xff")
    assert "utf-8" in run("--model /m", file)


def test_settings_can_be_checked_before_the_service_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_settings("verifier", main) == {}  # --model may come from elsewhere
    monkeypatch.setenv("SPECDEC_VERIFIER_KV_TOKENS", "lots")
    with pytest.raises(typer.BadParameter, match="valid integer") as refused:
        check_settings("verifier", main)
    assert refused.value.param_hint == "'SPECDEC_VERIFIER_KV_TOKENS'"
    monkeypatch.delenv("SPECDEC_VERIFIER_KV_TOKENS")
    monkeypatch.setenv("SPECDEC_VERIFIER_CONFIG", str(file))
    with pytest.raises(typer.BadParameter, match="No such file or directory") as refused:
        check_settings("verifier", main)
    assert refused.value.param_hint == f"'SPECDEC_VERIFIER_CONFIG' {file}"
    file.write_text("port: often\n")
    with pytest.raises(typer.BadParameter, match="valid integer"):
        check_settings("verifier", main)


def test_settings_are_read_as_the_service_reads_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("draft: [a:1, b:2]\nwindow: [2, 3]\nkv-tokens: 600\nmodel: /filed\n")
    for name, value in {"CONFIG": str(file), "KV_TOKENS": "700", "EXACT": "false"}.items():
        monkeypatch.setenv(f"SPECDEC_VERIFIER_{name}", value)
    assert check_settings("verifier", main) == {
        "draft": ["a:1", "b:2"],
        "window": (2, 3),
        "kv_tokens": 700,
        "model": Path("/filed"),
        "exact": False,
    }


@pytest.mark.parametrize(
    ("variables", "words", "problem"),
    [
        ({"SPECDEC_VERIFIER_ENGINE": "vllm"}, (), "vLLM is not installed"),
        ({"SPECDEC_VERIFIER_HEADS": "FOLDER"}, (), "FOLDER"),
        ({"SPECDEC_VERIFIER_DRAFT_MODEL": "FOLDER"}, (), "FOLDER: no config.json"),
        ({"SPECDEC_DRAFT_HEADS": "FOLDER"}, ("--local-draft", "m"), "--local-draft: cannot be combined"),
        ({"SPECDEC_ORCHESTRATOR_CONFIG": "FILE"}, (), "TEMPLATE"),
    ],
)
def test_up_checks_what_it_will_start(
    variables: dict[str, str], words: tuple[str, ...], problem: str, file: Path
) -> None:
    (template := file.with_name("template")).write_text("{% if %}")
    file.write_text(f"chat-template: {template}\n")
    names = {"FOLDER": file.parent, "FILE": file, "TEMPLATE": template}

    def spelled(text: str) -> str:
        return functools.reduce(lambda text, name: text.replace(name, str(names[name])), names, text)

    env = {name: spelled(value) for name, value in variables.items()}
    refused = CliRunner().invoke(app, ["up", "--port", "0", *words], env=env)
    assert refused.exit_code in (1, 2)
    assert spelled(problem) in refused.stderr
    assert "starts" not in refused.stderr


def test_up_refuses_a_wrong_variable_before_it_starts_a_service() -> None:
    refused = CliRunner().invoke(app, ["up", "--port", "0"], env={"SPECDEC_DRAFT_KV_TOKENS": "lots"})
    assert refused.exit_code == 2
    assert "Invalid value for 'SPECDEC_DRAFT_KV_TOKENS': Input should be a valid integer" in refused.stderr
    assert "starts" not in refused.stderr


def test_a_choice_is_refused_alike_in_every_place(file: Path) -> None:
    file.write_text("dtype: int3\n")
    for words, variables in (
        (["verifier", "--model", "m", "--dtype", "int3"], {}),
        (["verifier", "--model", "m", "--config", str(file)], {}),
        (["up", "--port", "0"], {"SPECDEC_VERIFIER_DTYPE": "int3"}),
        (["up", "--port", "0", "--dtype", "int3"], {}),
        (["train-heads", "--kind", "int3", "m", "out"], {}),
    ):
        refused = CliRunner().invoke(app, words, env=variables)
        assert re.search(r"Invalid value for '[^']+': 'int3' is not one of '", refused.stderr), refused.stderr


def test_a_service_tells_its_settings_at_start(tmp_path: Path) -> None:
    file = tmp_path / "orchestrator.yaml"
    file.write_text("port: 0\nsilence-seconds: 2\nverifier: 127.0.0.1:9\n")
    variables = {"SPECDEC_ORCHESTRATOR_MODEL": str(DEMO / "target"), "SPECDEC_ORCHESTRATOR_SILENCE": "2"}
    command = [sys.executable, "-m", "orchestrator", "--config", str(file), "--stop-with-stdin"]
    with subprocess.Popen(command, env=environment() | variables, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        _, logged = process.communicate(timeout=60)
    events = {each["event"]: each for each in map(json.loads, logged.splitlines())}
    assert events["settings"]["values"]["verifier"] == ["127.0.0.1:9"]
    assert events["settings"]["values"]["silence_seconds"] == 2.0
    assert events["settings"]["sources"] == {
        "model": "environment",
        "port": str(file),
        "silence_seconds": str(file),
        "verifier": str(file),
        "stop_with_stdin": "command line",
    }
    assert events["unknown_settings"]["variables"] == [
        "SPECDEC_ORCHESTRATOR_SILENCE (did you mean SPECDEC_ORCHESTRATOR_SILENCE_SECONDS?)"
    ]
