"""A starting service logs one line for each disabled fast path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.pods import Pod, free_address
from tests.services.conftest import Directories


@pytest.mark.parametrize("package", [pytest.param("verifier_service", marks=pytest.mark.verify), "draft_service"])
async def test_what_is_off_is_one_line_each(directories: Directories, package: str, tmp_path: Path) -> None:
    options = (package, "--model", str(directories.near), "--engine", "torch", "--threads", "1")
    pod = Pod(package, "tests.services.a_path_off", free_address(), options, tmp_path / "log")
    pod.start()
    try:
        await pod.until_ready()
    finally:
        pod.terminate()
        await pod.until_ended()
    lines = [json.loads(line) for line in pod.log.read_text().splitlines() if line.startswith("{")]
    told = [line for line in lines if line["event"] == "fast_path_off"]
    (line,) = [each for each in told if each["path"] == "test"]
    assert (line["why"], line["cost"], line["level"]) == ("it is off here", "it costs nothing", "warning")
    assert len(told) == len({each["path"] for each in told})
