"""transformers' own `generate` as a peer, one prompt after the other, in any of its modes.

    python -m bench.systems.transformers_generate --model DIR --draft DIR --dtype bfloat16

Without a draft there is no assisted generation.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.systems.generate import LOOKED_UP, Transformers
from bench.systems.protocol import Generate, Record, Request, serve


def start(args: argparse.Namespace) -> tuple[dict[str, Any], Generate]:
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer

    model = Transformers(args.model, args.draft, args.dtype)

    class Times(BaseStreamer):  # type: ignore[misc]
        """A streamer that records times. It receives the prompt first, then the tokens of each step."""

        def __init__(self, record: Record, prompt: int) -> None:
            self._record, self._prompt, self._begun = record, prompt, False

        def put(self, value: Any) -> None:
            if self._begun:
                self._record.add(self._prompt, value.numel())
            self._begun = True

        def end(self) -> None:
            """Do nothing: there is nothing to flush."""

    def generate(request: Request, record: Record) -> None:
        before = model.steps
        for number, prompt in enumerate(request.prompts):
            model(
                prompt,
                tokens=request.max_tokens,
                temperature=request.temperature,
                how=request.how,
                streamer=Times(record, number),
            )
        record.steps = model.steps - before

    flags = {"threads": torch.get_num_threads(), "draft": args.draft and args.draft.name, "looked_up": LOOKED_UP}
    return {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "flags": flags,
    }, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args()
    serve(lambda _: start(args))


if __name__ == "__main__":
    main()
