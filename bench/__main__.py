"""All benchmarks by name.

python -m bench                  lists them
python -m bench NAME [options]   runs one; `--help` after its name lists its options
"""

from __future__ import annotations

import importlib
import sys

ROOMS = {
    "speed": {
        "speed": "tokens a second and latencies, beside transformers, vLLM and llama.cpp",
        "leaderboard": "several reports of speed in one table",
        "draft-length": "run time by the number of tokens drafted, beside transformers",
    },
    "quality": {
        "acceptance": "acceptance and tokens a step by rule, tree and temperature",
        "quality": "how varied naive, speculative and contrastive texts are",
    },
    "engine": {
        "engine": "step time over the roofline of the device's memory, beside transformers: random weights",
        "token-masks": "what a grammar costs in each step, by the size of the vocabulary",
        "start": "seconds until a verifier is ready, by phase, with an empty and with a filled cache folder",
    },
    "gpu": {
        "gpu": "all that only a GPU can show, in ten minutes: tests, exactness, graphs, drafts, speed",
    },
    "serving": {
        "first-token": "seconds from a command until the first token, beside vLLM's and llama.cpp's servers",
        "chunking": "what a long prompt costs the other streams",
        "device": "services on devices that only take time: what the host costs beside a GPU's steps",
        "draft-steps": "processor time of a draft service for each node, with a model that costs nothing",
        "drain": "what ending a pod takes, and what clients notice of it",
        "fairness": "what a tenant notices of another that floods the verifier",
        "shares": "what a text takes beside texts of another tenant, by what those ask for",
        "step-shares": "the same in processor time, with a step loop turned by hand",
        "goodput": "requests complete before their deadline, by how many come",
        "restarts": "what users notice while servers are killed and started again, beside vLLM's",
        "overload": "who is served and who is refused under ten times the load",
        "prefix-routing": "how much of chats is computed again where several verifiers share the work",
        "predictions": "what `specdec evaluate` predicts, beside what is measured",
        "production": "processor time that TLS, API keys, metrics and traces cost",
        "http-overhead": "processor time and first tokens by OpenAI's HTTP API, beside gRPC",
        "structured-output": "what a JSON schema does to speed, with drafts and without, beside vLLM",
        "overhead": "where the time of a verifier's step goes, by profile",
    },
    "network": {
        "delay": "what distance between the services costs, beside synchronous drafting",
        "wire": "bytes a token between the services",
        "capacity": "session-steps a second that an orchestrator relays",
    },
    "simulation": {
        "simulate": "other devices, delays and numbers of sessions: simulated",
        "cost": "what drafts bring per device, and capacity at a latency: simulated",
    },
    "tools": {
        "pad-model": "makes a model that says the same and costs more",
        "to-gguf": "converts a Llama model for llama.cpp",
        "tables": "fills the tables of docs/benchmarks from bench/results",
    },
}
"""The benchmarks by package and name, with their subjects. The module NAME in the package has a function `main`, which
takes the arguments after the name; it is imported only when run, since most import torch."""

MODULES = {name: f"bench.{room}.{name.replace('-', '_')}" for room, names in ROOMS.items() for name in names}


def listed() -> str:
    """Return the list of all benchmarks, by room."""
    rooms = ("".join(f"  {name:14} {what}\n" for name, what in names.items()) for names in ROOMS.values())
    return "\n".join(rooms)


def main(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help", "--list"):
        print(f"usage: python -m bench NAME [--help] [options]\n\n{listed()}", end="")
        return
    name, *options = given
    if name not in MODULES:
        print(f"bench: unknown benchmark {name!r}; there are:\n\n{listed()}", end="", file=sys.stderr)
        sys.exit(2)
    importlib.import_module(MODULES[name]).main(options)


if __name__ == "__main__":
    main(sys.argv[1:])
