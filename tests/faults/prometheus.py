"""A real Prometheus on this machine that scrapes and evaluates our rules every second."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from tests.faults.pods import free_address

WINDOW = "10s"
"""Replaces the ranges of rules and panels; a range of a day becomes two of these."""

START_SECONDS = 30.0


def hurried(rules: str) -> str:
    """Return the rules with seconds instead of minutes and without `for` delays."""
    rules = re.sub(r"for: \w+", "for: 0s", rules)
    rules = re.sub(r"\[30m\]\) >= 3", "[60s]) >= 3", rules)  # restarts take longer
    return re.sub(r"\[\d+m\]", f"[{WINDOW}]", rules).replace("offset 1d", "offset 20s")


def here(expression: str) -> str:
    """Return a panel's or rule's expression with Grafana's variables substituted, and with shortened ranges."""
    return hurried(expression.replace("$__rate_interval", WINDOW).replace("$job", ".*"))


class Prometheus:
    """A Prometheus process that ends when its context exits."""

    def __init__(self, folder: Path, targets: Sequence[str], rules: str) -> None:
        """Scrape `targets`. `rules`: content of an alert rule file."""
        self._folder = folder
        self._address = free_address()
        self._process: subprocess.Popen[bytes] | None = None
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "specdec", "static_configs": [{"targets": list(targets)}]}],
        }
        folder.mkdir()
        (folder / "rules.yaml").write_text(rules)
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Self:
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)

    async def until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                await self._get("-/ready")
                return
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, (self._folder / "log").read_text()
                await asyncio.sleep(0.1)

    async def alerts(self) -> dict[str, list[str]]:
        """Return the firing alerts: the messages of each, one per label set."""
        found: dict[str, list[str]] = {}
        for alert in await self._ask("alerts"):
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["annotations"]["description"])
        return found

    async def has_values(self, expression: str, since: float) -> bool:
        """Return True if an expression has had a numeric value at any second since a Unix time."""
        found = await self.values(expression, since, 1)
        return any(math.isfinite(value) for _, values in found for value in values.values())

    async def values(self, expression: str, since: float, every: int) -> list[tuple[dict[str, str], dict[int, float]]]:
        """Return the series of an expression: labels, and values by seconds after the Unix time `since`, one every
        `every` seconds."""
        found = await self._ask("query_range", query=expression, start=since, end=time.time(), step=every)
        return [
            (series["metric"], {round(float(at) - since): float(value) for at, value in series["values"]})
            for series in found
        ]

    async def until(self, expression: str) -> None:
        """Wait until an expression has a value again."""
        begin = time.time()
        while not await self.has_values(expression, begin):
            await asyncio.sleep(0.1)

    async def _ask(self, what: str, **asked: object) -> Any:
        answer = json.loads(await self._get(f"api/v1/{what}?{urllib.parse.urlencode(asked)}"))
        assert answer["status"] == "success", answer
        return answer["data"]["alerts" if what == "alerts" else "result"]

    async def _get(self, path: str) -> str:
        def get() -> str:
            with urllib.request.urlopen(f"http://{self._address}/{path}", timeout=10) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(get)
