"""Commands create API keys and use them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.train import HOME
from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from orchestrator.tenants.accounts import Accounts
from orchestrator.tenants.file import TenantsFile
from specdec import api_keys
from specdec.engine.model_directory import ModelDirectory
from specdec.exit_status import ExitStatus
from tests.stack import served

KEY = "a key"


async def specdec(*words: str, **environment: str) -> tuple[int, str, str]:
    """Run the command; return (status, stdout, stderr)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec.cli", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_key_is_made_with_its_hash(tmp_path: Path) -> None:
    status, out, _ = await specdec("api-key")
    lines = dict(line.split(":", 1) for line in out.splitlines())
    key = lines["key"].strip()
    assert status == 0
    assert lines["hash"].strip() == api_keys.hash_of(key)
    assert len(key) > 40
    file = tmp_path / "key"
    file.write_text(key + "\n")
    assert (await specdec("api-key", "--hash-of", str(file)))[1].strip() == api_keys.hash_of(key)


async def test_commands_bring_a_key(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(f"tenants:\n  acme: {{api_keys: ['{api_keys.hash_of(KEY)}']}}\n")
    (tmp_path / "key").write_text(KEY)
    model = ServedModel.of(ModelDirectory(HOME / "target"))
    accounts = Accounts(TenantsFile(tmp_path / "tenants.yaml"))
    async with served(GenerationServicer(Catalog.of(model, Peers(Pods())), accounts=accounts)) as (address, _):
        ask = ("tokenize", "def main(", "--count", "--address", address)
        status, _, err = await specdec(*ask)
        assert status == ExitStatus.REFUSED
        assert "authorization: is missing" in err
        assert "--api-key-file" in err
        for words, environment in (
            (("--api-key-file", str(tmp_path / "key")), {}),
            ((), {"SPECDEC_API_KEY": KEY}),
            ((), {"SPECDEC_API_KEY_FILE": str(tmp_path / "key")}),
        ):
            status, out, err = await specdec(*ask, *words, **environment)
            assert (status, out.strip()) == (0, str(len(model.tokenizer.encode("def main(")))), err
        status, _, err = await specdec("stats", address, "--api-key-file", str(tmp_path / "key"))
        assert status == ExitStatus.REFUSED
        assert "tenant 'acme' is not an operator (`operator: true` in the tenants file)" in err


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file"), (b"", "must contain an API key"), (b"a\nb", "must contain an API key")]
)
async def test_a_file_without_a_key_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    status, _, err = await specdec("tokenize", "x", "--api-key-file", str(file))
    assert status == ExitStatus.USAGE
    assert f"{file}: {why}" in err
    assert "--api-key-file" in err
