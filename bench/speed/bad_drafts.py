"""Measure bad drafts: slow ones, a random one, one that cannot be paired. None may be slower than no draft.

    python -m bench bad-drafts --temperature 0.8 --prompts 20

There is a stack for every draft, and one without draft and speculation, on all cores and in fast numerics: plain
decoding at its best. One stream; all stacks take turns prompt by prompt, and a ratio is the median over prompts of the
ratio within one. The verifier needs a while to find out what a draft is worth, so the second half of the prompts is
reported separately. A slow draft sleeps for the rest of each step's minimum time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.arguments import parser_of
from demo.prompts import held_out
from specdec.client import Client
from specdec.local import DEMO, PROGRAMS, Stack

LAGS = (1.0, 5.0, 50.0)
"""Least milliseconds of a slow draft's step."""


def at_random(folder: Path) -> Path:
    """Write a copy of the demo's draft with random weights; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(DEMO / "draft")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "draft" / file, folder)
    return folder


def foreign(folder: Path) -> Path:
    """Write a copy of the demo's draft in which two tokens have changed places; return its folder."""
    shutil.copytree(DEMO / "draft", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    a, b = list(tokens)[-2:]
    tokens[a], tokens[b] = tokens[b], tokens[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@contextlib.contextmanager
def stacks(dtype: str) -> Iterator[dict[str, Client]]:
    """Yield a client for each stack, by name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as exits:

        def start(*draft_options: str, draft: str | None = None, step_ms: float = 0.0) -> Client:
            options = ("--no-exact",) if draft == "none" else ()
            programs: dict[str, tuple[str, ...]] = dict(PROGRAMS)
            if step_ms:
                programs["draft"] = ("bench.systems.pod", "draft")
                draft_options = (*draft_options, "--step-ms", str(step_ms))
            stack = Stack.start(
                draft=draft, dtype=dtype, verifier_options=options, draft_options=draft_options, programs=programs
            )
            return exits.enter_context(Client(exits.enter_context(stack).address))

        found = {"plain": start(draft="none"), "good": start()}
        for lag in LAGS:
            found[f"{lag:g} ms a step"] = start(step_ms=lag)
        found["random"] = start("--model", str(at_random(Path(folder, "random"))))
        found["another tokenizer"] = start("--model", str(foreign(Path(folder, "foreign"))))
        yield found


def main(given: Sequence[str]) -> None:
    parser = parser_of("bad-drafts", __doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--guess", action="store_true", help="with what the verifier guesses by itself")
    args = parser.parse_args(given)

    with stacks(args.dtype) as clients:
        rates: dict[str, list[float]] = {name: [] for name in clients}
        different = dict.fromkeys(clients, 0)
        drafted = dict.fromkeys(clients, 0)
        for number, prompt in enumerate(held_out(args.prompts + 1)):
            said = {}
            for name, client in clients.items():
                begin = time.perf_counter()
                result = client.complete(
                    tokens=prompt,
                    max_tokens=args.tokens,
                    temperature=args.temperature,
                    seed=number,
                    ignore_end_token=True,
                    speculation="off" if name == "plain" else "auto" if args.guess else "draft",
                )
                if number:  # the first prompt warms up
                    rates[name].append(args.tokens / (time.perf_counter() - begin))
                    drafted[name] += result.completions[0].finish.speculation.sources.get("remote_draft", 0)
                said[name] = result.completions[0].tokens
            for name in clients:
                different[name] += said[name] != said["plain"]

    print(f"{'draft':20} tokens/s  over plain: all   second half  drafted tokens  texts that differ")
    for name, mine in rates.items():
        ratios = [a / b for a, b in zip(mine, rates["plain"], strict=True)]
        late = statistics.median(ratios[len(ratios) // 2 :])
        share = drafted[name] / (args.tokens * args.prompts)
        print(
            f"{name:20} {statistics.median(mine):8.0f}  {statistics.median(ratios):15.2f}  {late:12.2f}"
            f"  {share:14.2f}  {different[name]:17}"
        )
