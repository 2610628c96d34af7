"""Send the same HTTP requests to this server and to others, and print how many each accepts.

    python -m tests.compatibility                                     # ours, with the demo pair
    python -m tests.compatibility --vllm http://127.0.0.1:8000 --llama-cpp http://127.0.0.1:8080
    python -m tests.compatibility --page docs/http-compatibility.md   # with the answers of all servers asked so far

The others are started beforehand, with the model that `--model DIR` writes:

    python -m tests.compatibility --model build/compatibility/demo    # a copy of the demo target; as GGUF beside it
    build/vllm/bin/python -m vllm.entrypoints.openai.api_server --model build/compatibility/demo --enforce-eager \\
        --enable-auto-tool-choice --tool-call-parser granite --gpu-memory-utilization 0.15 --port 8000
    llama-server --model build/compatibility/demo.gguf --jinja --chat-template-file build/compatibility/demo.jinja \\
        --ctx-size 2048 --port 8080

Answers are kept in build/compatibility. The exit status is 1 if an answer of this server does not fit its schema.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import httpx2

from specdec.local.child import LocalError
from specdec.wire.tool_formats import GRANITE
from testing.gguf_model import convert
from tests.clients.environment import ROOT
from tests.clients.served import copy_pair, serving
from tests.compatibility import asked, schemas
from tests.compatibility.answers import Answers, answers_of, model_of, version_of
from tests.compatibility.page import page
from tests.tool_templates import TEMPLATES

FOLDER = ROOT / "build" / "compatibility"
SYSTEMS = ("specdec", "vLLM", "llama.cpp")
ENDS = ("<|endoftext|>",)
"""Texts of the end tokens. A word among them would cut off answers where their grammar allows no end."""
CONTEXT = 2048


def ask(system: str, url: str) -> Answers:
    """Send a server all requests."""
    requests = list(chain(asked.requests(), schemas.requests()))
    print(f"{system}: {len(requests)} requests", file=sys.stderr, flush=True)
    date = datetime.date.today().isoformat()
    return Answers(system, version_of(url), date, answers_of(url, model_of(url), requests))


def write_model(directory: Path) -> None:
    """Write a copy of the demo target with tools, and beside it its GGUF file and its chat template."""
    with tempfile.TemporaryDirectory() as folder:
        target, _ = copy_pair(Path(folder), ENDS, CONTEXT)
        shutil.copytree(target, directory)
    convert(directory, directory.with_suffix(".gguf"))
    directory.with_suffix(".jinja").write_text(TEMPLATES[GRANITE])


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.compatibility", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", metavar="URL", help="vLLM's server")
    parser.add_argument("--llama-cpp", metavar="URL", help="llama.cpp's server")
    parser.add_argument("--model", type=Path, metavar="DIR", help="write the model for them, and do nothing else")
    parser.add_argument("--page", type=Path, help="file for the answers of all servers asked so far")
    args = parser.parse_args(given)
    for option, url in (("--vllm", args.vllm), ("--llama-cpp", args.llama_cpp)):
        if url is not None and not url.startswith(("http://", "https://")):
            parser.error(f"{option}: {url} must begin with http:// or https://")
    if args.model is not None and args.model.exists():
        parser.error(f"--model: {args.model} is there already")
    return args


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    if args.model is not None:
        write_model(args.model)
        return
    os.environ.setdefault("SPECDEC_CACHE_DIR", str(FOLDER / "cache"))
    try:
        for system, url in (("vLLM", args.vllm), ("llama.cpp", args.llama_cpp)):
            if url is not None:
                ask(system, url).save(FOLDER / f"{system}.json")
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder), ENDS, CONTEXT) as server:
            ask("specdec", server.url).save(FOLDER / "specdec.json")
    except (LocalError, OSError, httpx2.TransportError) as error:
        sys.exit(f"compatibility: {error}")
    files = [file for system in SYSTEMS if (file := FOLDER / f"{system}.json").is_file()]
    answers = [Answers.load(file) for file in files]
    said = page(list(chain(asked.requests(), schemas.requests())), answers)
    if args.page is None:
        print(said)
    else:
        args.page.write_text(said, encoding="utf-8")
    if wrong := [name for name, answer in answers[0].answers.items() if answer.fits is False]:
        sys.exit(f"compatibility: these do not fit their schemas: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
