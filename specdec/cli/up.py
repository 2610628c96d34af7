"""`specdec up`: all three services on this machine."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from specdec import ports
from specdec.cli.access import OPEN, Access
from specdec.cli.failure import fail, program, say
from specdec.cli.passed_on import SET_BY_UP, Values, arguments
from specdec.cli.pod_stats import NoSuchServiceError, ask
from specdec.cli.up_tls import access_to_pods, check_tls, credentials_hint
from specdec.command_line import Host, LogLevel
from specdec.engine.cpu_count import MAX_THREADS
from specdec.engine.placement import Placement, WantedDtype
from specdec.exit_status import ExitStatus
from specdec.local.stack import Stack
from specdec.roles import PACKAGES, load
from specdec.serving.process.listening import ListenError, check_apart, check_free, from_here

ANSWER_SECONDS = 5.0

ALWAYS_SET = SET_BY_UP | {"log_level", "drain_seconds"}
"""Options that this command always passes to services: their environment and files cannot set these."""


def description(stack: Stack, model: str, to_pods: Access = OPEN) -> dict[str, Any]:
    """Return the address for clients on this machine, the addresses at which all services listen, and for each service
    its memory; for pods also their model and placement, for the orchestrator the name of its `model`. `to_pods` is the
    access to pods."""
    found: dict[str, dict[str, Any]] = {}
    for role, address in stack.addresses.items():
        process = stack.children[role].process.pid
        found[role] = {"address": address, "process_id": process, "memory_bytes": _memory(process)}
        if role in ("verifier", "draft"):
            found[role] |= _pod(from_here(address), to_pods)
        elif role == "orchestrator":
            found[role]["models"] = [model]
    return {"address": stack.address, "services": stack.addresses, "pods": found}


def _pod(address: str, to_pods: Access) -> dict[str, Any]:
    """Return the model and the placement of a pod. Nothing if it does not answer: it is busy or dead, which `Upkeep`
    handles, and start-up continues."""
    with contextlib.suppress(grpc.RpcError, NoSuchServiceError), to_pods.channel(address) as channel:
        seen = ask(channel, ANSWER_SECONDS).as_json()
        placed = {name: seen["pod"][name] for name in ("device", "dtype", "threads")}
        return {"model": seen["identity"]["model"], **placed, "kv_tokens": seen["kv_tokens"]}
    return {}


def lines(
    found: Mapping[str, Any], *, tls: str = "", https: bool = False, by_key: bool = False, has_model: bool = True
) -> Iterator[str]:
    """Yield a description as lines: one per service, then how to send requests. `tls`: the TLS options of commands for
    the orchestrator; `https`: the HTTP API uses TLS; `by_key`: requests need a tenant's API key; `has_model`: a draft
    model or heads propose candidates."""
    for role, pod in found["pods"].items():
        parts = [f"{pod['memory_bytes'] / 1e9:.2f} GB of memory now"]
        if "model" in pod:
            threads = " or ".join(map(str, pod["threads"]))
            of_cpu = [f"{threads} thread{'s' * (threads != '1')}"] if threads else []
            parts = [f"{pod['model']} on {pod['device']} in {pod['dtype']}", *of_cpu, *parts]
            parts.append(f"{pod['kv_tokens']} tokens of KV cache")
        yield f"{role:13} {pod['address']:21} {', '.join(parts)}"
    usual = f"127.0.0.1:{ports.ORCHESTRATOR}"
    asked = "" if found["address"] == usual else f" --address {found['address']}"
    key = tls + " --api-key-file FILE" * by_key
    yield f'Try it: {program()} generate "def main("{asked}{key}'
    if openai := found["services"].get("openai"):
        base = f"OPENAI_BASE_URL=http{'s' * https}://{from_here(openai)}/v1"
        model = found["pods"]["orchestrator"]["models"][0]
        yield f"With any OpenAI client: {base} OPENAI_API_KEY={'KEY' if by_key else 'none'} (model {model})"
    else:
        yield f"No HTTP API: --openai-port {ports.OPENAI} adds it."
    if not has_model:
        yield "No draft model: candidates come from n-grams. --draft DIR or --local-draft DIR adds one."
    at = "" if found["address"] == usual else f" {found['address']}"
    operators = " (an operator's key)" * by_key
    yield f"Which drafters propose tokens, and why: {program()} stats{at}{key}{operators}"
    yield "Ctrl-C stops all services."


def _memory(process: int) -> int:
    """Return the private resident bytes of a process; 0 if it has ended. Like the memory table, this excludes pages of
    mapped files, such as libraries and weights, which are page cache."""
    with contextlib.suppress(OSError):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return 1024 * int(
            (status.get("RssAnon") or status.get("VmRSS", "0")).split()[0]
        )  # sandboxes may report only the sum
    return 0


def up(
    target: Annotated[
        Path | None,
        typer.Option(
            "--target", "--model", help="Directory of the target model, or its GGUF file. Default: the demo's target."
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Directory of the draft model, or its GGUF file, or `none` for no draft service. Default: the demo's "
            "draft; none with --target or --local-draft."
        ),
    ] = None,
    local_draft: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a local draft, or its GGUF file: a small model run by the verifier itself. Replaces the "
            "draft service, unless --draft is given too."
        ),
    ] = None,
    dtype: Annotated[
        WantedDtype,
        typer.Option(
            help="Data type of the target; auto: the checkpoint's, if the device computes it fast, else float32."
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="Device of the target: cpu, cuda, or cuda:N.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_THREADS,
            help="CPU threads of the target. Default: one for each core, one fewer while the draft works or other "
            "programs slow the target down.",
        ),
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(min=512, help="Size of the target's KV cache in tokens.")] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of the orchestrator, for clients; with 0, every service takes a free port."
        ),
    ] = ports.ORCHESTRATOR,
    verifier_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port of the verifier. Default: {ports.VERIFIER}."),
    ] = None,
    openai_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Also serve OpenAI's HTTP API, on this port (usually {ports.OPENAI}). Default: no HTTP API.",
        ),
    ] = None,
    draft_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port of the draft service. Default: {ports.DRAFT}."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the running services and their addresses as one JSON object.")
    ] = False,
    log_level: LogLevel = "warning",
    *,
    passed: Mapping[str, Values],
) -> None:
    """Start all three services on this machine, and restart them if they die. Ctrl-C stops them.

    Every option of a service is also one of this command, prefixed with the service's name: --verifier-step-rows 64,
    --draft-device cuda, --orchestrator-workers 2, --openai-allow-origin https://chat.example.com. `specdec verifier
    --help`, `specdec draft --help`, `specdec orchestrator --help` and `specdec openai --help` list them.
    """
    from specdec.engine.heads.kinds import memory_of_draft_heads, memory_of_features, memory_of_heads
    from specdec.engine.model_file import ModelDirectoryError
    from specdec.engine.preflight.check import Beside, Wanted, check
    from specdec.engine.preflight.memory_table import memory_lines, memory_of
    from specdec.engine.unsupported import UnsupportedModelError
    from specdec.local import LocalError, ModelPaths, Stack
    from specdec.local.child import DRAIN_SECONDS
    from specdec.local.upkeep import Upkeep
    from specdec.serving.process import logs
    from specdec.text.check import check_text

    logs.configure("up", "warning")  # so that a closed stderr or a full disk under it does not stop the services
    stop: list[int] = []
    given = {"dtype": dtype, "device": device, "threads": threads, "kv_tokens": kv_tokens}
    own: dict[str, Values] = {  # this command's options and defaults: they override a service's environment and file
        "verifier": {name: value for name, value in given.items() if value is not None},
        "draft": {},
        "orchestrator": {"host": host},
        "openai": {"host": host},
    }
    not_started = {"draft": draft == "none", "openai": openai_port is None}
    configured = {role: {} if not_started.get(role) else _configured(role) for role in own}
    local_draft = local_draft or configured["verifier"].get("draft_model")
    of_verifier, of_draft, of_orchestrator, of_openai = (
        {name: value for name, value in configured[role].items() if name not in ALWAYS_SET} | own[role] | passed[role]
        for role in own
    )
    draining = (of_verifier, of_draft, of_orchestrator, of_openai)
    drain = max(float(values.get("drain_seconds", DRAIN_SECONDS)) for values in draining)
    for values in draining:  # a text ends when the first service stops, so all get the same drain time
        values.setdefault("drain_seconds", drain)
    try:
        # 1. Validate early, before any service loads its model.
        if passed["openai"] and openai_port is None:
            options = ", ".join(f"--openai-{name.replace('_', '-')}" for name in passed["openai"])
            fail(f"{options}: needs --openai-port, which starts the HTTP API", ExitStatus.USAGE)
        if "models" in configured["orchestrator"]:
            fail(
                "--orchestrator-models (SPECDEC_ORCHESTRATOR_MODELS): this command serves one model, --target; run "
                "`specdec orchestrator` to serve several",
                ExitStatus.USAGE,
            )
        models = ModelPaths.chosen(target, draft, local_draft)
        runs_heads = "heads" in of_draft  # draft service with heads: its model is the target, whose features it reads
        others = {"--draft": draft, "--local-draft": local_draft, "--verifier-heads": of_verifier.get("heads")}
        if runs_heads and (given_too := [option for option, value in others.items() if value is not None]):
            fail(
                f"{given_too[0]}: cannot be combined with --draft-heads (SPECDEC_DRAFT_HEADS), which replaces it",
                ExitStatus.USAGE,
            )
        if runs_heads:
            models = models._replace(draft=models.target)
            of_draft.setdefault("engine", "torch")
            of_verifier.setdefault("features", of_draft["heads"])
        if models.draft is None and passed["draft"]:
            options = ", ".join(f"--draft-{name.replace('_', '-')}" for name in passed["draft"])
            fail(f"{options}: needs --draft or --draft-heads, which start a draft service", ExitStatus.USAGE)
        started = {"verifier": of_verifier, "draft": of_draft, "orchestrator": of_orchestrator, "openai": of_openai}
        if models.draft is None:
            del started["draft"]
        if openai_port is None:
            del started["openai"]
        check_tls(started)
        to_pods = access_to_pods(of_orchestrator)
        listening = {
            "--verifier-port": (of_verifier, (port and ports.VERIFIER) if verifier_port is None else verifier_port),
            "--draft-port": (of_draft, (port and ports.DRAFT) if draft_port is None else draft_port),
            "--port": (of_orchestrator, port),
        }
        if models.draft is None:
            del listening["--draft-port"]
        if openai_port is not None:
            listening["--openai-port"] = of_openai, openai_port
        addresses = {option: (values.get("host", "127.0.0.1"), at) for option, (values, at) in listening.items()}
        check_apart(addresses)
        wanted = {"target": Wanted(models.target, _placement(of_verifier))}
        if models.local_draft is not None:
            placement = replace(_placement(of_verifier), beside=True, weights="stored")
            wanted["local draft"] = Wanted(models.local_draft, placement)
        if models.draft is not None:
            placement = replace(_placement({"engine": "onnx"} | of_draft), is_draft=True)
            draft_heads = partial(memory_of_draft_heads, of_draft["heads"]) if runs_heads else None
            wanted["draft"] = Wanted(models.draft, placement, translates=True, heads=draft_heads)
        given_heads: Path | None = of_verifier.get("heads")
        heads: Beside | None = None
        if given_heads is not None:
            heads = partial(memory_of_heads, given_heads)
        elif "features" in of_verifier:
            heads = partial(memory_of_features, of_verifier["features"])
        opened = dict(zip(wanted, check(*wanted.values(), beside=heads), strict=True))  # converts GGUF files
        check_text(opened["target"], of_orchestrator.get("chat_template"))
        served, *_ = of_orchestrator.get("served_model_name") or [opened["target"].name]
        for values, at in listening.values():
            values["port"] = at
        check_free(addresses)
        tenants: Path | None = of_orchestrator.get("tenants")
        if tenants is not None:
            _check_tenants(tenants)
        for line in memory_lines(memory_of({role: (wanted[role], opened[role]) for role in wanted}, heads=heads)):
            say(line)

        # 2. Start the services, and restart dead ones. Until here a signal ends this process immediately.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, _: stop.append(n))
        with Stack.start(
            opened["target"].path,
            str(opened["draft"].path if "draft" in opened else "none"),
            local_draft=opened["local draft"].path if "local draft" in opened else None,
            draft_heads=of_draft.pop("heads", None),
            dtype=of_verifier.pop("dtype"),
            device=of_verifier.pop("device"),
            log_level=log_level,
            stopped=lambda: bool(stop),
            say=say,
            verifier_options=arguments(of_verifier),
            draft_options=arguments(of_draft),
            orchestrator_options=arguments(of_orchestrator),
            openai_options=None if openai_port is None else arguments(of_openai),
            drain_seconds=drain,
            forced=lambda: len(stop) > 1,
        ) as stack:
            found = description(stack, served, to_pods)
            https = "tls_cert" in of_openai
            has_model = any(path is not None for path in (models.draft, models.local_draft, given_heads))
            tls = credentials_hint(of_orchestrator)
            shown = lines(found, tls=tls, https=https, by_key=tenants is not None, has_model=has_model)
            print(json.dumps(found) if json_output else "\n".join(shown), flush=True)
            upkeep = Upkeep(stack, say)
            while not stop:
                time.sleep(0.2)
                if not stop:  # the signal may have stopped the services too
                    upkeep.look()
            least = min(float(values["drain_seconds"]) for values in (of_verifier, of_orchestrator))
            say(f"stopping: running requests have {least:g} s to finish; Ctrl-C again stops immediately")
    except (LocalError, ListenError, ModelDirectoryError, UnsupportedModelError) as error:
        if stop:
            raise SystemExit(ExitStatus.INTERRUPTED) from None
        fail(str(error))


def _configured(role: str) -> Values:
    """Return the options of a service from its environment and file; typer.BadParameter if it would refuse them."""
    from specdec.settings import check_settings  # imports YAML, absent in client-only installations

    return check_settings(role, load(f"{PACKAGES[role]}.__main__").main)


def _check_tenants(file: Path) -> None:
    """End the process if the orchestrator cannot use this file, which it would report only after loading models."""
    tenants = load("orchestrator.tenants.file")
    try:
        tenants.TenantsFile(file).read()
    except tenants.TenantsFileError as error:
        fail(str(error).replace("--tenants", "--orchestrator-tenants", 1))


def _placement(values: Mapping[str, object]) -> Placement:
    """Return the placement of a service's model from its options."""
    names = {name: name for name in ("dtype", "device", "kv_tokens", "weights")}
    names |= {"engine": "kind", "compile": "compiled", "max_sessions": "sessions"}
    return Placement(**{names[name]: value for name, value in values.items() if name in names})  # type: ignore[arg-type]
