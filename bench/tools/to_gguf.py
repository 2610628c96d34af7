"""Convert a Llama model directory to one GGUF file, the format of llama.cpp.

python -m bench to-gguf demo/target build/target.gguf
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.arguments import parser_of
from testing.gguf_model import TYPES, convert


def main(given: Sequence[str]) -> None:
    parser = parser_of("to-gguf", __doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=TYPES, help="dtype of the weights; default: unchanged")
    args = parser.parse_args(given)
    convert(args.directory, args.file, args.dtype)
