"""A deployment of the demo pair that is idle, busy and idle again: `python -m tests.services.busy_and_idle SECONDS`.

The orchestrator knows verifier and draft by name. The HTTP server runs in front of it.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

from specdec.client import Client
from specdec.local import DEMO, Stack
from testing.own_network import PEERS

TOKENS = 64
TEXTS = 4
SEEN_SECONDS = 60


def by_name(address: str) -> str:
    """Return a service's address with a name in place of 127.0.0.1."""
    return f"pod{PEERS}:{address.rpartition(':')[2]}"


def by_http(address: str) -> int:
    """Return the number of tokens of a completion by HTTP."""
    body = {"model": "target", "prompt": "def main(", "max_tokens": TOKENS, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=SEEN_SECONDS) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def main(idle_seconds: float) -> None:
    with Stack.start(DEMO / "target", str(DEMO / "draft"), route=by_name, openai_options=()) as stack:
        print(f"idle for {idle_seconds:g} s", flush=True)
        time.sleep(idle_seconds)
        with Client(stack.address, timeout=SEEN_SECONDS) as client:
            for seed in range(TEXTS):
                result = client.complete(
                    "def main(",
                    max_tokens=TOKENS,
                    temperature=0.8,
                    seed=seed,
                    speculation="always",
                    ignore_end_token=True,
                )
                speculation = result.completions[0].finish.speculation
                print(f"text {seed}: {speculation.offered} candidates offered", flush=True)
        print(f"{by_http(stack.addresses['openai'])} tokens by HTTP", flush=True)
        print(f"idle for {idle_seconds:g} s", flush=True)
        time.sleep(idle_seconds)


if __name__ == "__main__":
    main(float(sys.argv[1]))
