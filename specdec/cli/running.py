"""The running services of `specdec up`, described by themselves: as a line each, or as a JSON object for scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from specdec import ports
from specdec.cli.pod_stats import NoSuchServiceError, ask
from specdec.local.stack import Stack

ANSWER_SECONDS = 5.0


def description(stack: Stack) -> dict[str, Any]:
    """Return the address for clients, the addresses of all services, and for each pod its model, placement and
    memory."""
    pods = {role: _pod(role, address, stack.children[role].process.pid) for role, address in stack.addresses.items()}
    return {"address": stack.address, "services": stack.addresses, "pods": pods}


def _pod(role: str, address: str, process: int) -> dict[str, Any]:
    found: dict[str, Any] = {"address": address, "process_id": process, "memory_bytes": _memory(process)}
    if role == "openai":  # no model
        return found
    # A service that does not answer is busy or dead; `Upkeep` handles that, and start-up continues.
    with contextlib.suppress(grpc.RpcError, NoSuchServiceError), grpc.insecure_channel(address) as channel:
        seen = ask(channel, ANSWER_SECONDS).as_json()
        if identity := seen.get("identity"):
            found["model"] = identity["model"]
            found |= {name: seen["pod"][name] for name in ("device", "dtype", "threads")}
            found["kv_tokens"] = seen["kv_tokens"]
    return found


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description as lines: one per service, then how to send requests."""
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
    yield f'Try it: specdec generate "def main("{asked}'
    if openai := found["services"].get("openai"):
        yield f"With any OpenAI client: OPENAI_BASE_URL=http://{openai}/v1"
    yield "Ctrl-C stops all services."


def _memory(process: int) -> int:
    """Return the resident bytes of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
