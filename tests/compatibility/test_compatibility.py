"""Requests for comparing servers: answers are read correctly, and the page shows where servers differ."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility import asked, schemas
from tests.compatibility.__main__ import parsed
from tests.compatibility.answers import Answer, Answers, answers_of, key
from tests.compatibility.asked import CHATS, Asked
from tests.compatibility.page import page

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}


def chat(content: str, finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": finish, "message": {"content": content, **message}}]}


def called(arguments: str) -> dict[str, Any]:
    return chat("", tool_calls=[{"function": {"name": "w", "arguments": arguments}}])


def test_every_request_has_its_own_key() -> None:
    counts = Counter(key(each) for each in [*asked.requests(), *schemas.requests()])
    assert [name for name, count in counts.items() if count > 1] == []
    assert len(schemas.SCHEMAS) == 67


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((200, {}, chat('{"a": "x"}')), Answer(200, fits=True)),
        ((200, {}, called('{"a": "x"}')), Answer(200, fits=True)),
        ((200, {}, chat('{"a": "y"}')), Answer(200, fits=False)),
        ((200, {}, chat("no JSON")), Answer(200, fits=False)),
        ((200, {}, chat('{"a', "length")), Answer(200)),
        ((400, {}, {"error": {"message": "top_p: is 0"}}), Answer(400, "top_p: is 0")),
        ((404, {}, {"detail": "Not Found"}), Answer(404, "Not Found")),
        ((200, {"specdec-ignored": "a, b"}, chat('{"a": "x"}')), Answer(200, ignored=["a", "b"], fits=True)),
    ],
)
def test_an_answer_is_read(said: tuple[int, dict[str, str], Any], expected: Answer) -> None:
    status, headers, body = said
    assert ask(status, headers | {"content-type": "application/json"}, json.dumps(body)) == expected


def test_an_error_in_a_stream_is_an_error() -> None:
    events = ["{}", '{"error": {"message": "gone"}}', "[DONE]"]
    text = "".join(f"data: {event}\n\n" for event in events)
    assert ask(200, {"content-type": "text/event-stream"}, text, schema=None) == Answer(200, "gone")


def test_the_page_shows_where_servers_differ() -> None:
    requests = [Asked("fields", f"{name} = 1", "POST", CHATS) for name in ("both", "ours", "theirs")]
    taken, unknown, refused = Answer(200), Answer(200, ignored=["theirs"]), Answer(400, "ours | is `not` there")
    ours = Answers("specdec", "1", "2026-01-01", dict(zip(map(key, requests), (taken, taken, unknown), strict=True)))
    theirs = Answers("vLLM", "2", "2026-01-02", dict(zip(map(key, requests), (taken, refused, taken), strict=True)))
    said = page(requests, [ours, theirs])
    assert "Servers: specdec 1 (2026-01-01), vLLM 2 (2026-01-02)." in said
    assert "| fields taken, of 3 | 3 | 2 |" in said
    assert "| `ours = 1` | 200 | 400 ours \\| is 'not' there |" in said
    assert "| `theirs = 1` | 200, ignored | 200 |" in said
    assert "both = 1" not in said


def test_answers_are_kept(tmp_path: Path) -> None:
    answers = Answers("specdec", "1", "2026-01-01", {"a": Answer(400, "b"), "c": Answer(200, ignored=["d"], fits=True)})
    answers.save(tmp_path / "new" / "specdec.json")
    assert Answers.load(tmp_path / "new" / "specdec.json") == answers


def test_an_address_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["--llama-cpp", "127.0.0.1:8080"])
    assert "--llama-cpp: 127.0.0.1:8080 must begin with http:// or https://" in capsys.readouterr().err


def ask(status: int, headers: dict[str, str], text: str, schema: dict[str, Any] | None = SCHEMA) -> Answer:
    """Serve this answer to a request for the model `m`; return it as it was read."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert json.loads(self.rfile.read(int(self.headers["content-length"]))) == {"model": "m", "n": 1}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds between looks for its end
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            (answer,) = answers_of(url, "m", [Asked("fields", "n", "POST", CHATS, {"n": 1}, schema)]).values()
        finally:
            server.shutdown()
            serving.join()
    return answer
