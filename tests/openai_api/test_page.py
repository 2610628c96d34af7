"""The page at `/`: its files, its headers, and the statistics that it shows to operators."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from demo.train import HOME as DEMO
from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from orchestrator.tenants.accounts import Accounts
from orchestrator.tenants.file import TenantsFile
from specdec import api_keys, roles
from specdec.engine.model_directory import ModelDirectory
from specdec.openai_api.page_files import FOLDER, page_routes
from specdec.openai_api.routes import STATS
from specdec.v2 import generation_pb2 as pb
from specdec.v2 import verifier_pb2
from tests.client.fake_server import FakeServer
from tests.openai_api.front import front
from tests.stack import served

PATHS = [route.path for route in page_routes()]
FILES = sorted(FOLDER.iterdir())

MAX_BYTES = 64 << 10
"""Maximum bytes of all files together: the page must load quickly over a slow line."""

NAMESPACE = "http://www.w3.org/2000/svg"
"""A URL in SVG files and scripts that browsers do not fetch."""


def test_every_file_has_a_route_and_all_are_small() -> None:
    assert {"/", *(f"/page/{file.name}" for file in FILES if file.name != "index.html")} == set(PATHS)
    assert sum(file.stat().st_size for file in FILES) < MAX_BYTES


def test_a_wheel_has_the_files() -> None:
    project = tomllib.loads((roles.FOLDER / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["specdec"]
    assert all(any(file.match(f"specdec/{pattern}") for pattern in patterns) for file in FILES)


@pytest.mark.parametrize("path", PATHS)
async def test_files_are_served_to_anyone(path: str) -> None:
    """Even without a key, and without an orchestrator."""
    async with (
        front("127.0.0.1:1", with_page=True) as http,
        httpx2.AsyncClient(base_url=f"http://{http.address}") as client,
    ):
        answer = await client.get(path)
        head = await client.head(path)
        etag = {"if-none-match": answer.headers["etag"]}
        again, other = await client.get(path, headers=etag), await client.get(path, headers={"if-none-match": '"x"'})
    assert (answer.status_code, other.status_code) == (200, 200)
    assert answer.content == (FOLDER / (path.removeprefix("/page/").strip("/") or "index.html")).read_bytes()
    assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == answer.headers["etag"]


@pytest.mark.parametrize("path", [*PATHS, STATS])
async def test_nothing_is_served_where_the_page_is_off(path: str) -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http, httpx2.AsyncClient() as client:
        assert (await client.get(f"http://{http.address}{path}")).status_code == 404


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_names_no_other_host_and_what_it_names_is_there(file: Path) -> None:
    text = file.read_text()
    assert not re.findall(r"(?:\w+:)?//[\w.-]+\.\w+", text.replace(NAMESPACE, ""))
    at = "/" if file.name == "index.html" else f"/page/{file.name}"
    named = re.findall(r"\b(?:src|href)=\"([^#\"]+)\"", text) if file.suffix == ".html" else []
    named += re.findall(r"\bfrom \"([^\"]+)\"", text)
    assert named or file.name not in ("index.html", "main.js")
    assert {urljoin(at, name) for name in named} <= set(PATHS)


def test_the_page_obeys_its_own_policy() -> None:
    """Inline scripts and styles would be dropped by browsers."""
    text = (FOLDER / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)


async def test_statistics_are_asked_with_the_callers_key() -> None:
    async with FakeServer(keys=["mine"]) as orchestrator, front(orchestrator.address, with_page=True) as http:
        pod = pb.PodView(address="v:1", verifier=verifier_pb2.GetStatsResponse(kv_tokens=1 << 40))
        orchestrator.stats = pb.GenerationServiceGetStatsResponse(requests=7, verifiers=[pod])
        async with httpx2.AsyncClient(base_url=f"http://{http.address}") as client:
            refused = await client.get(STATS)
            answer = await client.get(STATS, headers={"authorization": "Bearer mine"})
    assert refused.status_code == 401
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    told = answer.json()
    assert told["requests"] == 7
    assert (told["verifiers"][0]["address"], told["verifiers"][0]["verifier"]["kv_tokens"]) == ("v:1", 1 << 40)
    assert "draft" not in told["verifiers"][0]
    assert [request.pods for request in orchestrator.stats_requests] == [True]


async def test_tenants_see_no_pods(tmp_path: Path) -> None:
    """The orchestrator decides: it answers only with an operator's key."""
    tenants = tmp_path / "tenants.yaml"
    entries = {name: api_keys.hash_of(f"{name}'s key") for name in ("acme", "watcher")}
    tenants.write_text(
        f"tenants:\n  acme: {{api_keys: ['{entries['acme']}']}}\n"
        f"  watcher: {{api_keys: ['{entries['watcher']}'], operator: true}}\n"
    )
    accounts = Accounts(TenantsFile(tenants))
    await accounts.start()
    model = ServedModel.of(ModelDirectory(DEMO / "target"))
    catalog = Catalog.of(model, Peers(Pods(["127.0.0.1:1"])))
    async with (
        served(GenerationServicer(catalog, accounts=accounts)) as (address, _),
        front(address, with_page=True) as http,
        httpx2.AsyncClient(base_url=f"http://{http.address}") as client,
    ):
        answers = {name: await client.get(STATS, headers={"authorization": f"Bearer {name}'s key"}) for name in entries}
        nobody = await client.get(STATS)
    assert nobody.status_code == 401
    assert answers["acme"].status_code == 403
    assert (
        answers["acme"].json()["error"]["message"]
        == "tenant 'acme' is not an operator (`operator: true` in the tenants file)"
    )
    assert answers["watcher"].status_code == 200
    (pod,) = answers["watcher"].json()["verifiers"]
    assert pod["address"] == "127.0.0.1:1"
    assert "verifier" not in pod  # the verifier does not answer
