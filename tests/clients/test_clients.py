"""The ten most used clients, and the table of all clients: every check has a client, and the page has their results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.__main__ import parsed
from tests.clients.checks.uses import Server
from tests.clients.clients import CLIENTS, MOST_USED, Client
from tests.clients.environment import CHECKS, ROOT, STAMP, Environment
from tests.clients.page import page
from tests.clients.runs import Result, run_check
from tests.clients.served import serving

PAGE = ROOT / "docs" / "clients.md"
SHARED = {"__init__.py", "__main__.py", "uses.py", "uses.mjs", "weather.py", "main.mjs", "ai_sdk.mjs"}
"""Files in `checks/` that belong to no client."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("models")) as served:
        yield served


def _if_installed(client: Client) -> object:
    installed = Environment(client).installed
    missing = pytest.mark.skipif(not installed, reason=f"is not installed (make clients CLIENTS={client.name})")
    return pytest.param(client, marks=missing, id=client.name)


@pytest.mark.verify
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", map(_if_installed, MOST_USED))
def test_it_works(client: Client, server: Server, tmp_path: Path) -> None:
    environment = Environment(client)
    uses = run_check(environment.command(), environment.programs, server, tmp_path / "log")
    said = (tmp_path / "log").read_text()[-4000:]
    assert uses.problem is None, said
    assert uses.fails.keys() == client.refused, said
    assert uses.works


def test_every_check_has_a_client() -> None:
    files = {path.name for path in CHECKS.iterdir() if path.suffix in (".py", ".mjs")}
    assert files - SHARED == {client.check for client in CLIENTS}


def test_every_client_has_a_name_and_a_version_of_its_own() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS) > 45
    assert len(MOST_USED) == 10
    for client in CLIENTS:
        assert re.fullmatch(r"\d+(\.\w+)+", client.version), client
        assert client.package, client
    scoped = next(client for client in CLIENTS if client.name == "ai-openai")
    assert (scoped.package, scoped.version) == ("@ai-sdk/openai", "3.0.141")
    extra = next(client for client in CLIENTS if client.name == "litellm-proxy")
    assert (extra.package, extra.version) == ("litellm[proxy]", "1.108.7")


def test_an_environment_is_that_of_its_packages(tmp_path: Path) -> None:
    environment = Environment(Client("a", "openai.py", "PyPI", ("openai==3.57.0", "b==1")), tmp_path)
    assert not environment.installed
    environment.home.mkdir()
    (environment.home / STAMP).write_text("openai==3.57.0\nb==1\n")
    assert environment.installed
    assert not Environment(Client("a", "openai.py", "PyPI", ("openai==3.58.0", "b==1")), tmp_path).installed


def test_a_check_runs_where_its_client_is(tmp_path: Path) -> None:
    library, module, program = (
        Environment(next(client for client in CLIENTS if client.name == name), tmp_path)
        for name in ("openai", "openai-node", "codex")
    )
    module.home.mkdir()
    assert library.command()[0] == str(tmp_path / "openai/bin/python")
    assert module.command() == ["node", str(tmp_path / "openai-node/main.mjs"), "openai"]
    assert (tmp_path / "openai-node" / "openai.mjs").is_file()
    assert program.command()[1:] == ["-m", "tests.clients.checks", "tests.clients.checks.codex"]
    assert program.programs == tmp_path / "codex/node_modules/.bin"


def test_the_page_has_clients_at_their_versions() -> None:
    rows = re.findall(r"^\| `(\S+)` \((PyPI|npm)\) \| (\S+) \|", PAGE.read_text(), re.MULTILINE)
    assert rows
    assert set(rows) <= {(client.package, client.registry, client.version) for client in CLIENTS}


def test_the_page_says_what_failed() -> None:
    good = Result("a", "a", "1.0", "PyPI", "2026-11-29", ["chat", "tools"])
    bad = Result("b", "@b/c", "2.0", "npm", "2026-11-30", ["chat"], {"tools": "Error: `x` | y\nz"}, "it hung")
    text = page([good, bad])
    assert "Run on 2026-11-29 to 2026-11-30: 2 clients, 1 without a failure." in text
    assert "| `a` (PyPI) | 1.0 | chat; tools | - |" in text
    assert "| `@b/c` (npm) | 2.0 | chat | it hung; tools: `Error: 'x' \\| y z` |" in text


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["openai", "nobody"], "no such client: nobody; there are openai, anthropic, "),
        (["--address", "http://127.0.0.1:1", "--page", "x.md"], "--page is about the server that is started"),
    ],
)
def test_a_wrong_command_line_is_refused(given: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(given)
    assert what in capsys.readouterr().err


def test_clients_are_run_in_the_order_of_the_table() -> None:
    assert [client.name for client in parsed(["codex", "openai"]).clients] == ["openai", "codex"]
    assert len(parsed([]).clients) == len(CLIENTS)
