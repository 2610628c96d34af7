"""`python -m verifier_service`: serve a target model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.serving.server import ServerSettings, StartError, run
from verifier_service.servicer import Limits, VerifierServicer
from verifier_service.step_loop import SCRATCH_SLOTS, StepLoop


def main(
    model: Annotated[Path, typer.Option(help="Directory of the target model, in Hugging Face's layout.")],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="What the model computes in.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the forward pass.")] = 1,
    slots: Annotated[int, typer.Option(min=64, help="Tokens of key/value memory.")] = 16384,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions open at once at most.")] = 256,
    max_candidates: Annotated[
        int, typer.Option(min=1, max=64, help="Candidates a session verifies in a step at most.")
    ] = 12,
    exact: Annotated[
        bool, typer.Option(help="Pad attention so that a row does not depend on its batch; off is a little faster.")
    ] = True,
    drain_seconds: Annotated[float, typer.Option(min=0)] = 30.0,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    stop_with_stdin: Annotated[bool, typer.Option(help="End when stdin closes.")] = False,
) -> None:
    """Serve a target model: verify candidates, decide every token."""
    settings = ServerSettings(host, port, drain_seconds, log_level, stop_with_stdin)

    def start() -> VerifierServicer:
        import torch

        from specdec.engine.batch import LEAST_ROWS
        from specdec.engine.model_directory import ModelDirectory
        from specdec.engine.torch_engine import TorchEngine
        from specdec.serving.wire import identity_of

        directory = ModelDirectory(model)
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise StartError(f"device {device}: torch sees no CUDA device")
        engine = TorchEngine(
            directory,
            capacity=slots + SCRATCH_SLOTS,
            dtype=dtype,
            device=device,
            least_rows=LEAST_ROWS if exact else 1,
            threads=threads,
        )
        loop = StepLoop(engine)
        identity = identity_of(directory, engine.numerics, loop.slots_for_sessions)
        loop.start()
        return VerifierServicer(loop, identity, Limits(max_candidates=max_candidates, max_sessions=max_sessions))

    async def load() -> VerifierServicer:
        return await asyncio.to_thread(start)

    run(settings, load, "verifier")


if __name__ == "__main__":
    typer.run(main)
