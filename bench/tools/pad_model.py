"""Pad a model: make a copy with the same outputs and a higher cost, standing in for a larger one in measurements.

    python -m bench pad-model --source demo/target --out build/padded-60m --parameters 60M

`testing/padded_model.py` describes the method. README.md and config.json of the copy label it as padded: it is no
better than its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.arguments import parser_of
from testing.padded_model import PaddingError, pad_model


def parameter_count(text: str) -> int:
    """Return the number of parameters in "60M", "1.5B" or a plain number."""
    factor = {"M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    return round(float(text[:-1] if factor > 1 else text) * factor)


def main(given: Sequence[str]) -> None:
    parser = parser_of("pad-model", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="a Llama-style model's directory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parameters", type=parameter_count, required=True, help="60M, 1.5B, ...")
    args = parser.parse_args(given)
    try:
        label = pad_model(args.source, args.out, args.parameters)
    except PaddingError as error:
        raise SystemExit(str(error)) from error
    print(f"{args.out}: padded from {label['source_parameters'] / 1e6:.1f}M to {label['parameters'] / 1e6:.1f}M")
