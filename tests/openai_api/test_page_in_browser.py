"""The page in a real browser: what it shows adds up to what the API says."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.servicer import GenerationServicer
from orchestrator.tenants.accounts import Accounts
from orchestrator.tenants.file import TenantsFile
from specdec import api_keys
from specdec.v2 import generation_pb2 as pb
from testing.chromium import CHROMIUM, Page, page
from tests.client.fake_server import FakeServer
from tests.openai_api.front import front
from tests.services.conftest import Directories
from tests.stack import Stack, long_steps, served, stack, until

pytestmark = [pytest.mark.verify, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

DRAFTED = "forced=1&drafters=remote&temperature=0.8&seed=3"
IDLE = "document.querySelector('#stop').disabled && !document.querySelector('#send').disabled"

SHOWN = """Object.fromEntries([...document.querySelectorAll("#legend button")]
    .map((button) => [button.dataset.source, Number(button.querySelector("b").textContent)])
    .filter(([, count]) => count))"""
COLOURED = "[...document.querySelectorAll('.turn:first-child .t')].map((token) => token.className.split(' ')[1])"
TEXT = "[...document.querySelectorAll('.turn:first-child .t')].map((token) => token.textContent).join('')"
EVENTS = "[...document.querySelectorAll('#events li')].map((entry) => entry.textContent)"

CONTRASTS = """(() => {
    const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => rgb(colour).slice(0, 3)
        .map((part) => part / 255)
        .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const backOf = (element) => {
        const back = getComputedStyle(element).backgroundColor;
        return rgb(back)[3] === 0 ? backOf(element.parentElement) : back;
    };
    const all = "h1, h2, h3, label, button, td, th, summary, .t, .hint, .end, .given, #events li";
    return [...document.querySelectorAll(all)]
        .filter((element) => element.offsetParent && element.textContent.trim() && !element.disabled)
        .map((element) => {
            const [one, other] = [light(getComputedStyle(element).color), light(backOf(element))];
            const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
            return [ratio, element.outerHTML.slice(0, 80)];
        })
        .filter(([ratio]) => ratio < 4.5);
})()"""
"""Elements whose text has too little contrast (WCAG 2, level AA)."""

UNNAMED = """[...document.querySelectorAll("input, select, textarea, button, summary, table, [role=img], [role=log]")]
    .filter((element) => !(element.labels?.length || element.textContent.trim() || element.ariaLabel
        || element.getAttribute("aria-labelledby")))
    .map((element) => element.outerHTML)"""
"""Elements without a name for screen readers."""


@asynccontextmanager
async def shown(address: str, settings: str = "") -> AsyncIterator[tuple[Page, str]]:
    """Yield the page in front of an orchestrator, and its URL; check that it complained of nothing and called no other
    host."""
    async with front(address, with_page=True) as http, page() as opened:
        url = f"http://{http.address}/"
        await opened.open(f"{url}#{settings}")
        yield opened, url
        assert opened.complaints == []
        asked = {urlsplit(each).netloc for each in opened.urls if each != "about:blank"}
        assert asked == {http.address}


async def ask(opened: Page, prompt: str) -> None:
    """Enter a prompt and press Ctrl+Enter."""
    await opened.until("document.querySelector('#model').value")
    await opened.run(f"document.querySelector('#prompt').value = {json.dumps(prompt)}")
    await opened.run("document.querySelector('#prompt').focus()")
    await opened.press("Enter", control=True)
    await opened.until("!document.querySelector('#stop').disabled")


async def answers(opened: Page) -> list[list[dict[str, Any]]]:
    """Return the events of each stream that the page has read, without the last event, [DONE]."""
    bodies = [await opened.body(request) for request in opened.streams]
    return [[json.loads(event.removeprefix("data: ")) for event in body.split("\n\n")[:-2]] for body in bodies]


def slow(directories: Directories, **options: Any) -> Any:
    return stack(directories.target, directories.near, target_delay=long_steps, **options)


async def test_colours_add_up_to_the_counts_of_the_api(directories: Directories) -> None:
    async with (
        slow(directories) as services,
        shown(services.address, f"{DRAFTED}&max_tokens=60&compare=1&rejected=1&max_candidates=8") as (opened, _),
    ):
        await ask(opened, "the quick brown fox")
        await opened.until(IDLE)
        drafted, plain = await answers(opened)
        choices = [event["choices"][0] for event in drafted if event["choices"]]
        statistics = choices[-1]["specdec"]
        assert statistics["sources"]["remote_draft"] > 0
        assert await opened.run(SHOWN) == statistics["sources"]
        assert Counter(await opened.run(COLOURED)) == statistics["sources"]
        assert await opened.run(TEXT) == "".join(choice["text"] for choice in choices)
        assert "counted otherwise" not in await opened.run("document.querySelector('#texts').textContent")
        rejected = [
            each for choice in choices for c in choice["specdec"].get("chunks", []) for each in c.get("rejected", [])
        ]
        assert len(rejected) == await opened.run("document.querySelectorAll('.turn:first-child s.r').length") > 0
        row = "[...document.querySelectorAll('#speed [data-row={}] td')].map((cell) => Number(cell.textContent))"
        assert await opened.run(row.format("tokens")) == [60, 60]
        assert await opened.run(row.format("steps")) == [statistics["steps"], 60]
        last = [event["choices"][0] for event in plain if event["choices"]][-1]
        assert last["specdec"]["sources"] == {"plain": 60}
        ratio = await opened.run("document.querySelector('#ratio').textContent")
        assert ratio.startswith("The same tokens, ")
        assert await opened.run("document.querySelectorAll('#accepted tr').length") > 0
        assert await opened.run("document.querySelector('#spoken').textContent") != ""
        await opened.run("document.querySelector('#legend [data-source=remote_draft]').click()")
        assert await opened.run("document.querySelector('#texts').dataset.only") == "remote_draft"


async def test_a_draft_that_is_killed_and_comes_back_is_seen(directories: Directories) -> None:
    """Steps are so long that the text outlasts the draft's absence."""
    async with (
        stack(directories.target, directories.near, target_delay=lambda: time.sleep(0.08)) as services,
        shown(services.address, f"{DRAFTED}&max_tokens=200&compare=1") as (opened, _),
    ):
        (draft,) = services.drafts
        tokens = "document.querySelectorAll('.turn:first-child .t.remote_draft').length"
        await opened.run("document.querySelector('#pods').open = true")
        await opened.until("document.querySelectorAll('#pods-tables tbody tr').length === 2")
        await ask(opened, "the quick brown fox")
        await opened.until(f"{tokens} > 5")
        await draft.stop()
        await opened.until(f"{EVENTS}.some((text) => text.includes('{draft.address} does not answer'))")
        before = await opened.run(tokens)
        await draft.start()
        await opened.until(f"{EVENTS}.some((text) => text.includes('{draft.address} answers again'))")
        await opened.until(f"{tokens} > {before}")
        await opened.until(IDLE)
        assert (await opened.run("document.querySelector('#ratio').textContent")).startswith("The same tokens, ")
        assert "draft" in await opened.run("document.querySelector('#mode').textContent")


@asynccontextmanager
async def with_tenants(services: Stack, directory: Path) -> AsyncIterator[str]:
    """Yield the address of an orchestrator of the same pods that requires keys."""
    file = directory / "tenants.yaml"
    hashes = {name: api_keys.hash_of(f"{name}'s key") for name in ("acme", "watcher")}
    file.write_text(
        f"tenants:\n  acme: {{api_keys: ['{hashes['acme']}']}}\n"
        f"  watcher: {{api_keys: ['{hashes['watcher']}'], operator: true}}\n"
    )
    accounts = Accounts(TenantsFile(file))
    await accounts.start()
    verifiers, drafts = (Pods(pod.address for pod in pods) for pods in (services.verifiers, services.drafts))
    servicer = GenerationServicer(Catalog.of(services.model, Peers(verifiers, drafts)), accounts=accounts)
    async with served(servicer) as (address, _):
        yield address


async def test_a_tenant_sees_no_pods_and_an_operator_does(directories: Directories, tmp_path: Path) -> None:
    async with (
        slow(directories) as services,
        with_tenants(services, tmp_path) as address,
        front(address, with_page=True) as http,
        page() as opened,
    ):
        await opened.open(f"http://{http.address}/")
        await opened.until("!document.querySelector('#problem').hidden")
        assert "API key" in await opened.run("document.querySelector('#problem').textContent")
        assert await opened.run("document.activeElement.id") == "key"

        async def use(name: str) -> None:
            field = "document.querySelector('#key')"
            await opened.run(f"{field}.value = \"{name}'s key\"; {field}.dispatchEvent(new Event('change'))")
            await opened.until("document.querySelector('#model').value")

        await use("acme")
        await opened.run("document.querySelector('#pods').open = true")
        await opened.until("document.querySelector('#pods-state').textContent.startsWith('For operators')")
        assert await opened.run("document.querySelector('#pods-tables').textContent") == ""
        whole = await opened.run("document.body.textContent")
        assert not [pod.address for pod in (*services.verifiers, *services.drafts) if pod.address in whole]

        await use("watcher")
        await opened.until("document.querySelectorAll('#pods-tables tbody tr').length === 2")
        whole = await opened.run("document.querySelector('#pods-tables').textContent")
        assert all(pod.address in whole for pod in (*services.verifiers, *services.drafts))
        assert await opened.run("Object.keys(localStorage).length") == 0


class TwoModels(FakeServer):
    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        found = await super().ListModels(request, context)
        other = pb.ServedModel(name="other", context_tokens=8)
        return pb.ListModelsResponse(models=[*found.models, other])


async def test_a_pasted_link_chooses_its_model() -> None:
    chosen = "document.querySelector('#model').value"
    async with TwoModels() as server, shown(server.address) as (opened, _):
        await opened.until(f"{chosen} === 'fake'")
        await opened.run("location.hash = 'model=other&seed=3'")
        await opened.until(f"{chosen} === 'other'")
        assert "model=other" in await opened.run("location.hash")
        await opened.run("location.hash = 'seed=4'")
        await opened.until(f"{chosen} === 'fake'")


async def test_escape_stops_an_answer(directories: Directories) -> None:
    async with slow(directories) as services, shown(services.address, f"{DRAFTED}&max_tokens=200") as (opened, _):
        await ask(opened, "the quick brown fox")
        await opened.until("document.querySelectorAll('.t').length > 5")
        await opened.press("Escape")
        await opened.until(IDLE)
        assert "broken off" in await opened.run("document.querySelector('.end').textContent")
        assert await opened.run("document.querySelector('#problem').hidden")
        await until(lambda: services.idle)


@pytest.mark.parametrize("dark", [False, True])
async def test_it_is_for_everyone(directories: Directories, dark: bool) -> None:
    """Contrasts suffice, elements have names for screen readers, narrow windows fit, and the link has the settings."""
    settings = f"{DRAFTED}&max_tokens=40&rejected=1&max_depth=3"
    async with slow(directories) as services, shown(services.address) as (opened, url):
        await opened.look(width=320, height=640, dark=dark)
        await opened.open(f"{url}#{settings}")
        await opened.run("document.querySelectorAll('details').forEach((details) => (details.open = true))")
        await ask(opened, "the quick brown fox")
        await opened.until(IDLE)
        await opened.until("document.querySelectorAll('#pods-tables tbody tr').length === 2")
        assert await opened.run(CONTRASTS) == []
        assert await opened.run(UNNAMED) == []
        assert await opened.run("document.documentElement.scrollWidth") <= 320
        back = await opened.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(json.loads(back.replace("rgb(", "[").replace(")", "]"))) < 200) is dark
        await opened.run("document.querySelector('#ask [name=seed]').value = '77'")
        await opened.run("document.querySelector('#ask [name=window]').value = '3,4,2'")
        await opened.run("document.querySelector('#ask').dispatchEvent(new Event('change'))")
        link = await opened.run("location.href")
        assert parse_qsl(urlsplit(link).fragment) == [  # without the prompt
            ("temperature", "0.8"),
            ("seed", "77"),
            ("max_tokens", "40"),
            ("max_depth", "3"),
            ("window", "3,4,2"),
            ("drafters", "remote"),
            ("forced", "1"),
            ("rejected", "1"),
        ]
        await opened.open(link)
        assert await opened.run("document.querySelector('#ask [name=seed]').value") == "77"
        assert await opened.run(
            "[...document.querySelectorAll('[name=drafters]:checked')].map((box) => box.value)"
        ) == ["remote"]
