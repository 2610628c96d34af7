"""The server that clients are pointed at: a copy of the demo pair with tools, behind all services.

The copies differ from the demo pair in their settings. Their chat template has tools, in a format whose list of calls
the model closes after the first call. Their context is long enough for the prompts of coding agents; beyond the 1024
tokens that the pair was trained on, texts are nonsense, which does not matter to a protocol. Chats are greedy and end
after a few tokens, so that the right answer is known whatever a client can set.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specdec.local import DEMO, Stack
from specdec.wire.tool_formats import GRANITE
from tests.clients.checks.uses import PROMPT, QUESTION, TOKENS, Server
from tests.tool_templates import TEMPLATES

CONTEXT = 32768
"""Tokens of a sequence; the agents' prompts have about ten thousand."""
NAME = "demo"
ENDS = ("<|endoftext|>", "var", ")", "))", " =", "#", "def", " the", " a", " is", " of", " to", " in", " and", "user")
"""End tokens, so that answers end before their limit: some clients treat a cut-off answer as an error. None of them is
in the text after PROMPT, in calls or in structured answers; the answer to QUESTION ends with the second."""
ANSWER_SECONDS = 120.0
LEAST_CHARACTERS = 20
"""Minimum length of a right answer, so that it comes in several pieces."""


def copy_pair(folder: Path, texts: Sequence[str] = ENDS, context: int = CONTEXT) -> tuple[Path, Path]:
    """Copy the demo pair into a folder, with the end tokens `texts` and other settings; return target and draft."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    ends = [token for text in texts for token in tokenizer.encode(text).ids]
    assert len(ends) == len(texts), "a text is one token"
    made = []
    for name, source in ((NAME, "target"), ("draft", "draft")):
        made.append(to := folder / name)
        shutil.copytree(DEMO / source, to, dirs_exist_ok=True)
        for file, settings in {
            "config.json": {"max_position_embeddings": context},
            "tokenizer_config.json": {"model_max_length": context, "chat_template": TEMPLATES[GRANITE]},
            "generation_config.json": {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": ends},
        }.items():
            path = to / file
            path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    target, draft = made
    return target, draft


@contextlib.contextmanager
def serving(folder: Path, texts: Sequence[str] = ENDS, context: int = CONTEXT) -> Iterator[Server]:
    """Serve a pair made by `copy_pair` in this folder, and yield the server."""
    target, draft = copy_pair(folder, texts, context)
    with Stack.start(
        target,
        str(draft),
        verifier_options=("--kv-tokens", str(2 * CONTEXT)),
        draft_options=("--kv-tokens", str(2 * CONTEXT)),
        orchestrator_options=("--reflection",),
        openai_options=(),
    ) as stack:
        yield known(
            f"http://{stack.addresses['openai']}",
            "none",
            orchestrator=stack.address,
            tokenizer=str(target),
            contract=str(Path(__file__).parents[2] / "proto"),
        )


def known(url: str, key: str, **more: str) -> Server:
    """Return a server with its only model and its right answers, requested by plain HTTP."""
    ask = _Asking(url, key)
    (model, *others) = [entry["id"] for entry in ask("models")["data"]]
    if others:
        raise ValueError(f"{url} serves {model}, {', '.join(others)}: must serve one model")
    options = {"model": model, "max_tokens": TOKENS, "temperature": 0}
    completion = ask("completions", {"prompt": PROMPT, **options})["choices"][0]["text"]
    chat = ask("chat/completions", {"messages": [{"role": "user", "content": QUESTION}], **options})
    answer = chat["choices"][0]["message"]["content"]
    if min(len(completion.strip()), len(answer.strip())) < LEAST_CHARACTERS:
        raise ValueError(f"{url} answers {completion!r} and {answer!r}: too short to be seen in a stream")
    return Server(url, model, key, completion, answer, **more)


class _Asking:
    """Plain HTTP requests to a server."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def __call__(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/v1/{route}", data, self._headers)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)
