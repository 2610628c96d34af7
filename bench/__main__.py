"""All benchmarks by name.

python -m bench                  lists them
python -m bench NAME [options]   runs one; `--help` after its name lists its options
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    module: str  # has a function `main`, which takes the arguments after the name
    what: str  # it measures


BENCHMARKS = {
    "speed": Benchmark("bench.speed", "tokens a second and latencies, beside transformers, vLLM and llama.cpp"),
    "standings": Benchmark("bench.standings", "several speed reports in one table"),
    "draft-length": Benchmark("bench.draft_length", "run time by the number of tokens drafted, beside transformers"),
    "lookahead": Benchmark("bench.lookahead", "n-gram lookup and lookahead windows of several sizes"),
    "bad-drafts": Benchmark("bench.bad_drafts", "drafts that are slow, random, or cannot be paired"),
    "acceptance": Benchmark("bench.acceptance", "acceptance and tokens a step by rule, tree and temperature"),
    "quality": Benchmark("bench.quality", "how varied naive, speculative and contrastive texts are"),
    "engine": Benchmark("bench.engine", "step time over the roofline of memory, beside transformers: random weights"),
    "delay": Benchmark("bench.delay", "the cost of distance between services, beside synchronous drafting"),
    "wire": Benchmark("bench.wire", "bytes a token between the services"),
    "capacity": Benchmark("bench.capacity", "session-steps a second of an orchestrator"),
    "chunking": Benchmark("bench.chunking", "what a long prompt costs the other streams"),
    "overload": Benchmark("bench.overload", "who is served and who is refused under ten times the load"),
    "overhead": Benchmark("bench.overhead", "the verifier's step by part, profiled"),
    "simulate": Benchmark("bench.simulate", "other devices, delays and numbers of sessions: simulated"),
    "cost": Benchmark("bench.cost", "what drafts bring per device, and capacity at a latency: simulated"),
    "widen": Benchmark("bench.widen", "makes a model that costs more and says the same"),
    "to-gguf": Benchmark("bench.to_gguf", "converts a Llama model for llama.cpp"),
}
"""Their modules are imported when they are run: most bring torch."""


def listed() -> str:
    """Return the list of benchmarks, a line for each."""
    return "\n".join(f"  {name:16} {benchmark.what}" for name, benchmark in BENCHMARKS.items())


def main(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help"):
        print(f"usage: python -m bench NAME [--help] [options]\n\n{listed()}")
        return
    name, *options = given
    if name not in BENCHMARKS:
        print(f"bench: unknown benchmark {name!r}; there are:\n{listed()}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module(BENCHMARKS[name].module).main(options)


if __name__ == "__main__":
    main(sys.argv[1:])
