"""A stand-in for `llama-server`: a program with the same options and endpoints, on a real socket.

    python -m tests.bench.systems.stand_in_llama_server --host 127.0.0.1 --port 8080 --model FILE ...

Its text repeats the prompt. With `--spec-type` it generates two tokens per step; with an unknown type it exits with an
error. The `GGUF` file holds a word: "slow" takes a while to load, "torn" breaks streams off, "chatty" generates past
the end, "broken" fails to load. Requests are recorded in a file beside the model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SPECULATION = ("ngram-map-k", "draft-simple")
LOADING_ANSWERS = 3
"""Number of "loading" responses before a slow model is ready."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.path == "/health" and self.server.still_loading():
            self._answer(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
        elif self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._answer(200, {"build_info": "stand-in", "total_slots": self.server.slots})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.write_down(asked)
        if max(asked["prompt"]) > 100_000:
            self._answer(400, {"error": {"code": 400, "message": "Prompt contains invalid tokens"}})
            return
        if self.path == "/v1/completions":
            tokens = asked["max_tokens"] + (self.server.kind == "chatty")
            self._answer(200, {"choices": [{"text": "abc"[:tokens]}], "usage": {"completion_tokens": tokens}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for said in self.server.answer(asked):
            self._chunk(f"data: {json.dumps(said)}\n\n".encode())
            if self.server.kind == "torn":
                self.close_connection = True
                return
        self._chunk(b"")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def _answer(self, status: int, said: dict[str, Any]) -> None:
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Discard logs."""


class Server(ThreadingHTTPServer):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__((args.host, args.port), Handler)
        self.kind, self.slots = args.model.read_text(), args.parallel
        self._a_step = 1 if args.spec_type is None else 2
        self._answers_left = LOADING_ANSWERS if self.kind == "slow" else 0
        self._record, self._lock = args.model.with_suffix(".asked"), threading.Lock()

    def still_loading(self) -> bool:
        self._answers_left -= 1
        return self._answers_left >= 0

    def write_down(self, asked: dict[str, Any]) -> None:
        with self._lock, open(self._record, "a", encoding="utf-8") as record:
            record.write(json.dumps(asked) + "\n")

    def answer(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a piece per token, then the counts: half of the drafted tokens are accepted."""
        count = asked["n_predict"] + (2 if self.kind == "chatty" else 0)
        tokens = islice(cycle(asked["prompt"]), count)
        for number, token in enumerate(tokens, start=1):
            yield {"content": chr(97 + token % 26), "tokens": [token], "stop": False, "tokens_predicted": number}
        timings = {"predicted_n": count}
        if self._a_step > 1:
            timings |= {"draft_n": count, "draft_n_accepted": count // 2}
        yield {"content": "", "tokens": [], "stop": True, "tokens_predicted": count, "timings": timings}


def program(folder: Path) -> Path:
    """Write a script in `folder` that starts the stand-in; return its path."""
    file = folder / "llama-server"
    command = shlex.join([sys.executable, "-m", "tests.bench.systems.stand_in_llama_server"])
    file.write_text(f'#!/bin/sh\ncd {shlex.quote(str(ROOT))}\nexec {command} "$@"\n')
    file.chmod(0o755)
    return file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--model-draft", type=Path)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--ctx-size", type=int)
    parser.add_argument("--spec-type")
    args, _ = parser.parse_known_args()
    if args.spec_type is not None and args.spec_type not in SPECULATION:
        sys.exit(f"error while handling argument: unknown speculative type {args.spec_type}")
    if args.model.read_text() == "broken":
        print("loading", file=sys.stderr)
        print("error: failed to load the model", file=sys.stderr)
        print("exiting", file=sys.stderr)
        sys.exit(1)
    Server(args).serve_forever()


if __name__ == "__main__":
    main()
