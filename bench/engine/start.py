"""Seconds from a verifier's start until it is ready, by phase: the first start on a machine, with an empty cache
folder, and later ones. For comparison, imports and reading the weights in a separate process.

    python -m bench start
    python -m bench start --quick                   the demo target alone
    python -m bench start --models /models/a,/models/b

By default the models are the demo target and one with 230 million random parameters. The machine's load is printed with
each start: figures are valid on a quiet machine only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import markdown
from bench.arguments import limit, names, parser_of
from bench.conditions import as_installed
from bench.systems.altered import random_weights
from specdec.local import DEMO

TARGET = DEMO / "target"

WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
"""Differences of the random model's configuration from the demo target's: 230 million parameters."""

ALONE = """
import sys, time
from pathlib import Path
begin = time.monotonic()
import specdec.engine.engines.cpu_engine
imported = time.monotonic()
from safetensors.torch import load_file
for file in Path(sys.argv[1]).glob("*.safetensors"):
    for tensor in load_file(file).values():
        tensor.float().sum()
print(imported - begin, time.monotonic() - imported)
"""


@dataclass
class Start:
    kind: str
    seconds: float  # until it was ready
    phases: dict[str, float]
    load: float  # of the machine, before the start


def start(model: Path, folder: Path, kind: str) -> Start:
    """Start a verifier with this cache folder, and end it once it is ready."""
    load, begin = os.getloadavg()[0], time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, "-m", "verifier_service", "--model", str(model), "--port", "0", "--stop-with-stdin"],
            env=as_installed(SPECDEC_CACHE_DIR=str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        assert process.stdout is not None
        ready = process.stdout.readline()
        seconds = time.monotonic() - begin
        process.terminate()
        process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    if not ready:
        raise SystemExit(f"{model}: the verifier did not start:\n" + "\n".join(lines[-5:]))
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    (phases,) = [each["seconds"] for each in logged if each["event"] == "started"]
    return Start(kind, seconds, phases, load)


def alone(model: Path) -> tuple[float, float]:
    """Return the seconds of imports, and of reading all weights, by themselves."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(model)], capture_output=True, text=True, check=True, env=as_installed()
    )
    imports, weights = map(float, done.stdout.split())
    return imports, weights


def table(model: str, starts: Sequence[Start], imports: float, weights: float) -> str:
    phases = list(dict.fromkeys(name for each in starts for name in each.phases))
    lines = [f"{model}: imports {imports:.1f} s and reading the weights {weights:.1f} s by themselves", ""]
    rows = (
        [
            each.kind,
            f"{each.seconds:.1f}",
            *(f"{each.phases.get(name, 0.0):.1f}" for name in phases),
            f"{each.load:.1f}",
        ]
        for each in starts
    )
    return "\n".join([*lines, *markdown.table(["start", "ready after", *phases, "load"], rows)])


def main(given: list[str]) -> None:
    parser = parser_of("start", __doc__)
    parser.add_argument("--models", type=names, help="model directories, instead of the two")
    parser.add_argument(
        "--warm", type=int, default=3, help="number of starts with a warm cache folder (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="the demo target alone, once cold and once warm")
    options = parser.parse_args(given)
    limit(parser, options, 1, "warm")
    with tempfile.TemporaryDirectory() as folder:
        models = [Path(each) for each in options.models or [str(TARGET)]]
        if options.models is None and not options.quick:
            models.append(random_weights(TARGET, Path(folder, "random-230M"), "bfloat16", **WIDE))
        for model in models:
            cache = Path(folder) / f"cache-{model.name}"
            kinds = ["cold", *["warm"] * (1 if options.quick else options.warm)]
            starts = [start(model, cache, kind) for kind in kinds]
            print(table(model.name, starts, *alone(model)), end="\n\n", flush=True)
