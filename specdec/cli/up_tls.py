"""The TLS options of the services of `specdec up`: they must fit together, and their files must be usable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from specdec.cli.access import OPEN, Access
from specdec.cli.failure import fail
from specdec.cli.passed_on import Values
from specdec.exit_status import ExitStatus
from specdec.serving.callers.certificate import parse_name
from specdec.serving.tls import server_credentials
from specdec.wire.tls_files import TlsError, TlsFiles, channel_credentials


class ServiceCalls(NamedTuple):
    """Calls from one service to another. The caller's options for them are --CALLER-PREFIX-tls-ca and so on."""

    caller: str
    prefix: str
    called: str
    cannot: str  # how a message says that they fail


CALLS = (
    ServiceCalls("orchestrator", "peer", "verifier", "the orchestrator cannot connect to a verifier"),
    ServiceCalls("orchestrator", "peer", "draft", "the orchestrator cannot connect to a draft"),
    ServiceCalls("openai", "orchestrator", "orchestrator", "the HTTP API cannot connect to an orchestrator"),
)


def check_tls(services: Mapping[str, Values]) -> None:
    """End the process if a service could not connect to another, or would refuse its TLS options, which it reports only
    after models are loaded. `services` are the options by role of the services to start."""
    for calls in CALLS:
        if calls.caller in services and calls.called in services:
            _check_calls(calls, services[calls.caller], services[calls.called])
    for role, values in services.items():
        _check_client_names(role, values)
    try:
        for role, values in services.items():
            own = _files(role, values, "tls_cert", "tls_key", "tls_client_ca")
            if any(own.all):
                server_credentials(own)
        for caller, prefix in dict.fromkeys((calls.caller, calls.prefix) for calls in CALLS):
            _files(caller, services.get(caller, {}), *_of_caller(prefix)).read()
    except TlsError as error:
        fail(str(error))


def access_to_pods(orchestrator: Values) -> Access:
    """Return the access to verifiers and drafts that an orchestrator has with these options, which `check_tls` has
    checked."""
    files = _files("orchestrator", orchestrator, *_of_caller("peer"))
    if files.authorities is None:
        return OPEN
    return Access(channel_credentials(files.read()), tls_name=orchestrator.get("peer_tls_name"))


def credentials_hint(orchestrator: Values) -> str:
    """Return the options, without their values, that commands need to reach an orchestrator with these options."""
    if "tls_cert" not in orchestrator:
        return ""
    return " --tls-ca FILE" + " --tls-cert FILE --tls-key FILE" * ("tls_client_ca" in orchestrator)


def _check_calls(calls: ServiceCalls, caller: Values, called: Values) -> None:
    """End the process if TLS fits only one end of these calls."""
    cert, key, ca = _of_caller(calls.prefix)
    if "tls_cert" in called and ca not in caller:
        fail(
            f"{_with_variable(calls.called, 'tls_cert')}: {calls.cannot} with TLS without its CA; "
            f"give {_option(calls.caller, ca)} FILE too",
            ExitStatus.USAGE,
        )
    if ca in caller and "tls_cert" not in called:
        fail(
            f"{_with_variable(calls.caller, ca)}: {calls.cannot} without TLS; "
            f"give {_option(calls.called, 'tls_cert')} FILE and {_option(calls.called, 'tls_key')} FILE too",
            ExitStatus.USAGE,
        )
    if {"tls_cert", "tls_client_ca"} <= called.keys() and cert not in caller:  # without tls_cert: refused as such
        fail(
            f"{_with_variable(calls.called, 'tls_client_ca')}: {calls.cannot} that checks clients; "
            f"give {_option(calls.caller, cert)} FILE and {_option(calls.caller, key)} FILE too",
            ExitStatus.USAGE,
        )
    for name in (cert, key, f"{calls.prefix}_tls_name"):
        if name in caller and ca not in caller:
            fail(
                f"{_with_variable(calls.caller, name)}: needs TLS; give {_option(calls.caller, ca)} FILE too",
                ExitStatus.USAGE,
            )


def _check_client_names(role: str, values: Values) -> None:
    """End the process if the names for clients' certificates are invalid, or no client needs a certificate."""
    names: list[str] = values.get("tls_client_name") or []
    option = _with_variable(role, "tls_client_name")
    if names and "tls_client_ca" not in values:
        fail(
            f"{option}: is for clients with certificates; give {_option(role, 'tls_client_ca')} FILE too",
            ExitStatus.USAGE,
        )
    for name in names:
        try:
            parse_name(name)
        except ValueError as error:
            fail(f"{option}: {error}", ExitStatus.USAGE)


def _of_caller(prefix: str) -> tuple[str, str, str]:
    return f"{prefix}_tls_cert", f"{prefix}_tls_key", f"{prefix}_tls_ca"


def _files(role: str, values: Values, cert: str, key: str, ca: str) -> TlsFiles:
    """Return the TLS files given by these three of a service's options."""
    options = _option(role, cert), _option(role, key), _option(role, ca)
    return TlsFiles(values.get(cert), values.get(key), values.get(ca), options)


def _option(role: str, name: str) -> str:
    return f"--{role}-{name.replace('_', '-')}"


def _with_variable(role: str, name: str) -> str:
    """Return an option with its variable, since the value may come from the environment."""
    return f"{_option(role, name)} (SPECDEC_{role.upper()}_{name.upper()})"
