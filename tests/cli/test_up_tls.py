"""`specdec up` checks the TLS options and files of all services before it starts one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec import cli, ports
from specdec.cli.up import lines
from specdec.cli.up_tls import credentials_hint
from specdec.roles import environment
from tests.certificates import Authority
from tests.cli.running_up import running_up
from tests.models import make


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        pytest.param(
            ("--orchestrator-tls-cert", "c.pem", "--orchestrator-tls-key", "k.pem"), {}, marks=pytest.mark.verify
        ),
        ((), {"SPECDEC_ORCHESTRATOR_TLS_CERT": "c.pem", "SPECDEC_ORCHESTRATOR_TLS_KEY": "k.pem"}),
    ],
)
def test_openais_port_is_refused_where_the_orchestrator_wants_tls(
    words: tuple[str, ...], variables: dict[str, str]
) -> None:
    """Whether TLS is set by option or by environment variable, the HTTP server could not connect."""
    run = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--openai-port", "0", *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment() | variables)
    assert done.returncode == 2
    assert "--orchestrator-tls-cert (SPECDEC_ORCHESTRATOR_TLS_CERT): the HTTP API cannot connect to" in done.stderr
    assert "give --openai-orchestrator-tls-ca FILE too" in done.stderr


@pytest.mark.parametrize("role", ["verifier", "draft"])
def test_tls_of_a_pod_is_refused_where_the_orchestrator_has_no_ca_for_it(role: str) -> None:
    words = f"--{role}-tls-cert", "c.pem", f"--{role}-tls-key", "k.pem"
    run = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 2
    assert f"--{role}-tls-cert" in done.stderr
    assert "give --orchestrator-peer-tls-ca FILE too" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--orchestrator-peer-tls-ca", "ca.pem"),
            "a verifier without TLS; give --verifier-tls-cert FILE and --verifier-tls-key FILE too",
        ),
        (
            ("--orchestrator-peer-tls-ca", "a", "--verifier-tls-cert", "c", "--verifier-tls-key", "k"),
            "a draft without TLS; give --draft-tls-cert FILE and --draft-tls-key FILE too",
        ),
        (
            (
                *("--orchestrator-peer-tls-ca", "a", "--verifier-tls-cert", "c", "--verifier-tls-key", "k"),
                *("--verifier-tls-client-ca", "a"),
            ),
            "--verifier-tls-client-ca (SPECDEC_VERIFIER_TLS_CLIENT_CA): the orchestrator cannot connect to a verifier "
            "that checks clients; give --orchestrator-peer-tls-cert FILE and --orchestrator-peer-tls-key FILE too",
        ),
        (
            ("--openai-port", "0", "--openai-orchestrator-tls-ca", "ca.pem"),
            "an orchestrator without TLS; give --orchestrator-tls-cert FILE and --orchestrator-tls-key FILE too",
        ),
        (
            (
                *("--openai-port", "0", "--orchestrator-tls-cert", "c", "--orchestrator-tls-key", "k"),
                *("--orchestrator-tls-client-ca", "a", "--openai-orchestrator-tls-ca", "a"),
            ),
            "an orchestrator that checks clients; give --openai-orchestrator-tls-cert FILE and",
        ),
        (
            ("--orchestrator-peer-tls-cert", "c", "--orchestrator-peer-tls-key", "k"),
            "--orchestrator-peer-tls-cert (SPECDEC_ORCHESTRATOR_PEER_TLS_CERT): needs TLS; give "
            "--orchestrator-peer-tls-ca FILE too",
        ),
        (
            ("--orchestrator-tls-client-name", "app.example"),
            "--orchestrator-tls-client-name (SPECDEC_ORCHESTRATOR_TLS_CLIENT_NAME): is for clients with certificates; "
            "give --orchestrator-tls-client-ca FILE too",
        ),
        (
            ("--orchestrator-tls-client-name", "*.example", "--orchestrator-tls-client-ca", "a"),
            "'*.example' is not a host name, IP address or URI",
        ),
    ],
)
def test_tls_between_services_is_refused_where_one_side_lacks_it(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["up", "--port", "0", *words])
    assert done.exit_code == 2
    assert said in done.stderr


def refusal(*words: str | Path) -> str:
    """Return the last line with which the command refuses these options, before it starts anything."""
    done = CliRunner().invoke(cli.app, ["up", "--port", "0", *map(str, words)])
    assert done.exit_code == 1
    assert "starts" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("role", ["orchestrator", "openai"])
def test_files_are_read_before_anything_starts(role: str, authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    _, other = authority.issue("other")
    given = ("--openai-port", "0") if role == "openai" else ()
    cert_option, key_option, ca_option = (f"--{role}-tls-{name}" for name in ("cert", "key", "client-ca"))
    none = tmp_path / "none.pem"
    assert refusal(*given, cert_option, certificate) == f"specdec: {cert_option} is given, {key_option} is missing"
    assert refusal(*given, cert_option, none, key_option, key) == (
        f"specdec: {cert_option} {none}: No such file or directory"
    )
    for wrong in ((certificate, other), (key, key)):
        assert refusal(*given, cert_option, wrong[0], key_option, wrong[1]).startswith(
            f"specdec: {cert_option} {wrong[0]}, {key_option} {wrong[1]}: must be a certificate and its unencrypted key"
        )
    assert refusal(*given, ca_option, authority.file) == (
        f"specdec: {ca_option} is given, {cert_option} and {key_option} are missing"
    )


def test_files_for_calls_between_services_are_read_before_anything_starts(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    none = tmp_path / "none.pem"
    secured = ("--draft", "none", "--verifier-tls-cert", certificate, "--verifier-tls-key", key)
    assert refusal(*secured, "--orchestrator-peer-tls-ca", none) == (
        f"specdec: --orchestrator-peer-tls-ca {none}: No such file or directory"
    )
    secured = ("--openai-port", "0", "--orchestrator-tls-cert", certificate, "--orchestrator-tls-key", key)
    assert refusal(*secured, "--openai-orchestrator-tls-ca", none) == (
        f"specdec: --openai-orchestrator-tls-ca {none}: No such file or directory"
    )


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({}, ""),
        ({"tls_cert": "c", "tls_key": "k"}, " --tls-ca FILE"),
        ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, " --tls-ca FILE --tls-cert FILE --tls-key FILE"),
    ],
)
@pytest.mark.parametrize("by_key", [True, False])
def test_commands_for_an_orchestrator_name_what_it_needs(options: dict[str, str], hint: str, by_key: bool) -> None:
    orchestrator = {"address": f"127.0.0.1:{ports.ORCHESTRATOR}", "memory_bytes": 0, "models": ["m"]}
    found = {"address": orchestrator["address"], "pods": {"orchestrator": orchestrator}, "services": {"openai": "h:2"}}
    key, operators = (" --api-key-file FILE", " (an operator's key)") if by_key else ("", "")
    _, ask, openai, why, _ = lines(found, tls=credentials_hint(options), by_key=by_key)
    assert ask.endswith(f'generate "def main("{hint}{key}')
    assert openai.endswith(f"OPENAI_BASE_URL=http://h:2/v1 OPENAI_API_KEY={'KEY' if by_key else 'none'} (model m)")
    assert why.endswith(f"stats{hint}{key}{operators}")


@pytest.mark.timeout(900)  # several processes start, slowly on a busy machine
def test_services_with_tls_are_described_like_those_without(authority: Authority, tmp_path: Path) -> None:
    certificate, key = map(str, authority.issue("all"))
    ca, target = str(authority.file), make("llama", tmp_path / "target")
    own = ("cert", certificate), ("key", key), ("client-ca", ca)
    ours = [
        word for role in ("verifier", "orchestrator") for name, file in own for word in (f"--{role}-tls-{name}", file)
    ]
    theirs = [
        word
        for caller in ("orchestrator-peer", "openai-orchestrator")
        for name, file in (("ca", ca), ("cert", certificate), ("key", key))
        for word in (f"--{caller}-tls-{name}", file)
    ]
    with running_up("--target", str(target), "--draft", "none", "--openai-port", "0", *ours, *theirs) as up:
        pods = up.described["pods"]
    verifier = pods["verifier"]
    assert (verifier["model"], verifier["device"], verifier["dtype"]) == (target.name, "cpu", "float32")
    assert verifier["kv_tokens"] > 0
    assert pods["orchestrator"]["models"] == [target.name]
