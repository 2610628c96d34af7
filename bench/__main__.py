"""All benchmarks by name.

python -m bench                  lists them
python -m bench NAME [options]   runs one; `--help` after its name lists its options
"""

from __future__ import annotations

import importlib
import sys

from specdec.local.child import LocalError

PACKAGES = {
    "speed": {
        "speed": "throughput and latencies, compared with transformers, vLLM and llama.cpp",
        "leaderboard": "several speed reports in one table",
        "draft-length": "run time by draft length, compared with transformers",
    },
    "quality": {
        "acceptance": "acceptance and tokens per step by rule, tree and temperature",
        "quality": "diversity of naive, speculative and contrastive texts",
    },
    "papers": {
        "papers": "speed-up, accepted tokens and diversity of all methods, on the papers' prompts",
    },
    "engine": {
        "engine": "step time over the memory roofline with random weights, compared with transformers",
        "token-masks": "cost of a grammar per step, by vocabulary size",
        "start": "start-up time of a verifier by phase, with a cold and a warm cache folder",
    },
    "gpu": {
        "gpu": "all GPU checks in ten minutes: tests, exactness, graphs, drafts, speed",
    },
    "serving": {
        "first-token": "time from a command to the first token, compared with vLLM and llama.cpp",
        "chunking": "slow-down of other streams by a long prompt",
        "device": "host overhead of the services next to a GPU's steps, on devices that only take time",
        "drain": "duration of a pod's shutdown, and its effect on clients",
        "shares": "latency of a text next to another tenant's texts, by their options",
        "serve": "latencies, throughput and goodput of any deployment under a load of requests",
        "restarts": "effect on users of killed and restarted servers, compared with vLLM",
        "overload": "served and refused requests at ten times the load",
        "prefix-routing": "recomputed share of chats with several verifiers",
        "predictions": "predictions of `specdec evaluate`, compared with measurements",
        "learning": "a draft that learns from changing traffic, beside fixed ones and drafts trained for it",
        "production": "CPU cost of TLS, API keys, metrics and traces",
        "http-overhead": "CPU time and time to first token of OpenAI's HTTP API, compared with gRPC",
        "structured-output": "speed with a JSON schema, with and without drafts, compared with vLLM",
        "overhead": "profile of a verifier's step",
    },
    "network": {
        "delay": "cost of network delay between the services, compared with synchronous drafting",
        "wire": "bytes per token between the services",
        "capacity": "session-steps per second relayed by an orchestrator",
    },
    "simulation": {
        "simulate": "other devices, delays and numbers of sessions (simulated)",
        "cost": "gain of drafts per device, and capacity at a given latency (simulated)",
    },
    "tools": {
        "pad-model": "makes a model with the same output and a higher cost",
        "to-gguf": "converts a Llama model for llama.cpp",
        "tables": "fills the tables of docs/benchmarks from bench/results",
    },
}
"""The subjects of all benchmarks, by package and name. The module NAME of a package has a function `main`, which takes
the arguments after the name. It is imported only when run, since most modules import torch."""

MODULES = {name: f"bench.{package}.{name.replace('-', '_')}" for package, names in PACKAGES.items() for name in names}


def listed() -> str:
    """Return the list of all benchmarks, by package."""
    packages = ("".join(f"  {name:14} {what}\n" for name, what in names.items()) for names in PACKAGES.values())
    return "\n".join(packages)


def main(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help", "--list"):
        print(f"usage: python -m bench NAME [--help] [options]\n\n{listed()}", end="")
        return
    name, *options = given
    if name not in MODULES:
        print(f"bench: unknown benchmark {name!r}; there are:\n\n{listed()}", end="", file=sys.stderr)
        sys.exit(2)
    try:
        importlib.import_module(MODULES[name]).main(options)
    except LocalError as error:
        sys.exit(f"bench {name}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
