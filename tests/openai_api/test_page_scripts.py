"""The page's scripts count as the server does."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specdec.openai_api.page_files import FOLDER
from specdec.v2.model_pb2 import TokenSource
from specdec.wire.sources import ACCEPTED, accepted_histogram, histogram_entries, source_name

NODE = shutil.which("node")
DOM = Path(__file__).with_name("page_dom.mjs")

SCRIPT = """
import { readFileSync } from "node:fs";
const { Figures } = await import(process.argv[1]);
const told = [];
for (const chunks of JSON.parse(readFileSync(0, "utf8"))) {
  const figures = new Figures();
  const steps = chunks.map((chunk) => figures.take(chunk).length);
  told.push({ ...figures, steps: figures.steps, columns: steps, accepted: figures.accepted, rate: figures.rate });
}
console.log(JSON.stringify(told));
"""


def chunks_of(rng: random.Random) -> list[dict[str, object]]:
    """Return the chunks of a random answer; the last chunk may end with a candidate."""
    candidates, own = [int(s) for s in ACCEPTED], [s for s in TokenSource.values() if s and s not in ACCEPTED]
    found: list[dict[str, object]] = []
    count = rng.randint(1, 6)
    for number in range(count):
        steps = rng.randint(1, 3)
        sources: list[int] = []
        for _ in range(steps):
            sources += [*rng.choices(candidates, k=rng.randint(0, 5)), rng.choice(own)]
        if number == count - 1 and rng.random() < 0.5:
            sources, steps = [*sources, *rng.choices(candidates, k=2)], steps + rng.randint(1, 2)
        found.append(
            {
                "tokens": [rng.randint(0, 99) for _ in sources],
                "sources": [source_name(source) for source in sources],
                "numbers": sources,
                "steps": steps,
                "offered": 4 * steps,
                "elapsed_seconds": 0.5 * (number + 1),
            }
        )
    return found


def test_every_source_has_its_name_and_colours() -> None:
    scripts, styles = (FOLDER / "figures.js").read_text(), (FOLDER / "style.css").read_text()
    for source in map(source_name, filter(None, TokenSource.values())):
        assert f"  {source}: " in scripts
        assert f".swatch.{source} {{" in styles
        assert f"#texts[data-only={source}]" in styles
    for name in map(source_name, ACCEPTED):
        assert styles.count(f"--{name}: #") == 2  # light and dark
        assert f"#strip .{name} {{" in styles


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_figures_are_those_of_the_server() -> None:
    rng = random.Random(7)
    answers = [chunks_of(rng) for _ in range(50)]
    command = [NODE or "", "--input-type=module", "-e", SCRIPT, (FOLDER / "figures.js").as_uri()]
    done = subprocess.run(command, input=json.dumps(answers), capture_output=True, text=True, check=True, timeout=60)
    for chunks, told in zip(answers, json.loads(done.stdout), strict=True):
        sources: list[int] = [source for chunk in chunks for source in chunk["numbers"]]  # type: ignore[attr-defined]
        per_chunk = [accepted_histogram(c["numbers"], c["steps"]) for c in chunks]  # type: ignore[arg-type]
        histogram = sum(per_chunk[1:], per_chunk[0])
        assert told["histogram"] == histogram_entries(histogram)
        assert told["tokens"] == len(sources)
        assert told["sources"] == {source_name(s): sources.count(s) for s in sources}
        assert (told["steps"], told["offered"]) == (histogram.total(), 4 * histogram.total())
        above = [sum(histogram[i] for i in histogram if i > at) for at in range(max(histogram))]
        assert told["accepted"] == pytest.approx([steps / histogram.total() for steps in above])
        if len(chunks) > 1:
            first = len(chunks[0]["numbers"])  # type: ignore[arg-type]
            assert told["rate"] == pytest.approx((len(sources) - first) / (0.5 * (len(chunks) - 1)))


EVENTS = """
globalThis.document = { baseURI: "http://x/" };
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async () => new Response(':\\n\\ndata: {"a":1}\\n\\n:\\n\\ndata: [DONE]\\n\\n');
const { events } = await import(process.argv[1]);
const told = [];
for await (const event of events("v1/completions", {})) told.push(event);
console.log(JSON.stringify(told));
"""


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_comments_in_a_stream_are_skipped() -> None:
    command = [NODE or "", "--input-type=module", "-e", EVENTS, (FOLDER / "api.js").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [{"a": 1}]


def of_page(script: str) -> Any:
    """Return what a script tells about the page."""
    imports = f"const {{ ask, asked, at, form, open, stream, until }} = await import({json.dumps(DOM.as_uri())});"
    end = "process.stdout.write(JSON.stringify(told)); process.exit();"
    script = f"{imports}\nconst folder = {json.dumps(FOLDER.as_uri())};\n{script}\n{end}"
    command = [NODE or "", "--input-type=module", "-e", script]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_the_model_of_a_link_waits_for_the_key() -> None:
    told = of_page("""
        const told = [];
        const models = { data: [{ id: "one" }, { id: "two" }] };
        await open(folder, "#model=two", async (path, headers) => {
          if (path !== "/v1/models") return [404, {}];
          return headers.authorization ? [200, models] : [401, { error: { message: "no key" } }];
        });
        await until(() => at("#problem").textContent);
        at("#ask").dispatch("change");
        told.push(location.hash);
        at("#key").value = "key";
        at("#key").dispatch("change");
        await until(() => at("#model").length);
        at("#ask").dispatch("change");
        told.push(at("#model").value, location.hash);
    """)
    assert told == ["#model=two", "two", "#model=two"]


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_what_is_typed_during_an_answer_stays() -> None:
    told = of_page("""
        const told = [];
        let typed = null;
        await open(folder, "", async (path) => {
          if (path !== "/v1/chat/completions") return [404, {}];
          if (typed) at("#prompt").value = typed;
          return [200, stream("hello")];
        });
        await ask("chat", "hi");
        told.push(at("#prompt").value);
        typed = "and then?";
        await ask("chat", "hi again");
        told.push(at("#prompt").value, at("#problem").textContent);
    """)
    assert told == ["", "and then?", ""]


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_a_completion_ends_the_conversation_that_it_replaces() -> None:
    told = of_page("""
        await open(folder, "", async (path) => (path.includes("completions") ? [200, stream("hello")] : [404, {}]));
        await ask("chat", "one");
        await ask("chat", "two");
        await ask("completion", "def");
        await ask("chat", "three");
        const told = asked.map(([, body]) => body.messages?.length ?? body.prompt);
    """)
    assert told == [1, 3, "def", 1]
