"""Measure the cost of TLS, API keys, metrics and traces: processor time of all three services per token.

    python -m bench production [--rounds 6]

Two deployments of the demo pair run side by side, one plain and one with the feature, and alternate on the same texts.
The idle one costs next to nothing; processor time, unlike wall time, is hardly affected by other processes.
"""

from __future__ import annotations

import asyncio
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import trustme

from bench.arguments import limit, parser_of
from bench.paired import in_turns, ratios
from bench.serving.answers import Answer
from bench.systems.http_server import free_port
from bench.systems.processor_time import processor_seconds
from demo.prompts import held_out
from specdec import api_keys
from specdec.client import AsyncClient
from specdec.local import DEMO, Stack
from specdec.wire.tls_files import TlsFiles, channel_credentials

TOKENS = 200
FEW = ("--kv-tokens", "16384", "--threads", "1")
KEY = "a key"
FEATURES = ("tls", "keys", "metrics", "traces")
COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"


class Deployment:
    """Three services with some features, and their client."""

    def __init__(self, features: frozenset[str], folder: Path, exits: ExitStack) -> None:
        self._scraped: list[str] = []
        self._client: dict[str, Any] = {}
        options: dict[str, list[str]] = {
            "verifier": [*FEW],
            "draft": [*FEW],
            "orchestrator": [],
        }
        if "tls" in features:
            self._secure(options, folder)
        if "keys" in features:
            (folder / "tenants.yaml").write_text(
                f"tenants:\n  one: {{api_keys: ['{api_keys.hash_of(KEY)}'], tokens_per_minute: {10**9}}}\n"
            )
            options["orchestrator"] += ["--tenants", str(folder / "tenants.yaml")]
            self._client["api_key"] = KEY
        if "metrics" in features:
            for role in options:
                port = free_port()
                options[role] += ["--metrics-port", str(port)]
                self._scraped.append(f"http://127.0.0.1:{port}/metrics")
        if "traces" in features:
            collector = exits.enter_context(_collector())
            for words in options.values():
                words += ["--otlp-endpoint", collector]
        stack = Stack.start(
            DEMO / "target",
            str(DEMO / "draft"),
            dtype="float32",
            **{f"{role}_options": tuple(words) for role, words in options.items()},  # type: ignore[arg-type]
        )
        started = exits.enter_context(stack)
        self._address = started.address
        self._processes = {child.process.pid for child in started.children.values()}

    def _secure(self, options: dict[str, list[str]], folder: Path) -> None:
        authority, file = trustme.CA(), folder / "ca.pem"
        authority.cert_pem.write_to_path(str(file))
        issued = authority.issue_cert("127.0.0.1")
        certificate, key = folder / "cert.pem", folder / "key.pem"
        issued.private_key_pem.write_to_path(str(key))
        certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        for words in options.values():
            words += ["--tls-cert", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(file)]
        options["orchestrator"] += ["--peer-tls-ca", str(file)]
        options["orchestrator"] += ["--peer-tls-cert", str(certificate), "--peer-tls-key", str(key)]
        self._client["credentials"] = channel_credentials(TlsFiles(certificate, key, file).read())

    async def milliseconds_a_token(self, streams: int, number: int) -> float:
        """Return the processor time of all services per token, in milliseconds, with `streams` concurrent streams."""
        prompts = held_out(streams, tokens=64, seed=number)
        async with AsyncClient(self._address, timeout=300, **self._client) as client:

            async def one(prompt: list[int]) -> int:
                options: Any = {
                    "temperature": 0.8,
                    "seed": number + 1,
                    "ignore_end_token": True,
                    "speculation": "always",
                }
                return (await Answer().record(client.generate(tokens=prompt, max_tokens=TOKENS, **options))).tokens

            await one(prompts[0][:8])  # connected
            before = processor_seconds(self._processes)
            async with asyncio.TaskGroup() as group:  # an error of the scraping ends the measurement
                scraping = group.create_task(self._scrape())
                tokens = sum(await asyncio.gather(*map(one, prompts)))
                scraping.cancel()
            return 1e3 * (processor_seconds(self._processes) - before) / tokens

    async def _scrape(self) -> None:
        """Fetch all metrics every second, more often than Prometheus usually does."""
        while self._scraped:
            for url in self._scraped:
                await asyncio.to_thread(_fetch, url)
            await asyncio.sleep(1.0)


@contextmanager
def _collector() -> Iterator[str]:
    """Yield the address of a collector that drops all traces."""
    export: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(COLLECTOR, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


async def measure(
    plain: Deployment, featured: Deployment, streams: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Return milliseconds per token without the feature and with it, one entry per round."""
    found = await in_turns([plain, featured], rounds, lambda each, number: each.milliseconds_a_token(streams, number))
    return found[plain], found[featured]


def main(given: Sequence[str]) -> None:
    parser = parser_of("production", __doc__)
    parser.add_argument("--features", nargs="+", default=[*FEATURES, ",".join(FEATURES)])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args(given)
    limit(parser, args, 1, "streams", "rounds")
    if unknown := {feature for named in args.features for feature in named.split(",")} - set(FEATURES):
        parser.error(f"--features: {', '.join(sorted(unknown))} is none of {', '.join(FEATURES)}")
    for named in args.features:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
            plain = Deployment(frozenset(), Path(folder), exits)
            featured = Deployment(frozenset(named.split(",")), Path(folder), exits)
            for streams in args.streams:
                without, with_it = asyncio.run(measure(plain, featured, streams, args.rounds))
                ratio = ratios(with_it, without)
                print(
                    f"{named}, {streams} streams: {median(without):.2f} ms a token plain, "
                    f"{median(with_it):.2f} with it; ratio {ratio.median:.3f}, "
                    f"from {ratio.least:.3f} to {ratio.most:.3f} in {args.rounds} pairs",
                    flush=True,
                )
