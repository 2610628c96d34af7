"""`python -m draft_service`: serve a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from specdec.extras import needed_by

with needed_by("draft", "draft"):
    import structlog
    import typer

    from draft_service import expansion_width
    from draft_service.draft_loop import DraftLoop
    from draft_service.language_model import LanguageModelDrafter
    from draft_service.pass_times import PassTimes
    from draft_service.servicer import DraftLimits, DraftServicer
    from specdec import ports
    from specdec.command_line import run_command
    from specdec.engine import fast_paths
    from specdec.engine.cpu_count import MAX_THREADS, threads_for
    from specdec.engine.engines.loading import load_engine
    from specdec.engine.memory import set_memory_policy
    from specdec.engine.placement import DraftKind, Placement, WantedDtype
    from specdec.engine.preflight.check import Wanted, check
    from specdec.grammar.compiler import GrammarCompiler
    from specdec.serving.grammar_trials import GrammarTrials
    from specdec.serving.identity import identity_of, pod_info
    from specdec.serving.process.options import serving
    from specdec.serving.process.server import ServerSettings, in_a_thread_of_its_own, run

log = structlog.get_logger()


@serving(ports.DRAFT)
def main(
    model: Annotated[
        Path,
        typer.Option(
            help="Directory of the draft model, an export by `specdec export` or in Hugging Face's layout; or a GGUF "
            "file, converted on first use."
        ),
    ],
    engine: Annotated[
        DraftKind,
        typer.Option(
            help="onnx: ONNX Runtime, which exports a directory in Hugging Face's layout on first use. torch: "
            "specdec's own engine for the device. eager: the model's own layers, slow, for comparison."
        ),
    ] = "onnx",
    dtype: Annotated[
        WantedDtype,
        typer.Option(
            help="Data type of the draft; float16 is for GPUs, and onnx has no bfloat16. auto: the export's, or the "
            "checkpoint's, if the device computes it fast, else float32."
        ),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="Device of the model: cpu, cuda, or cuda:N for one of several GPUs.")
    ] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_THREADS,
            help="CPU threads of the forward pass; fewer than the machine's cores if a verifier shares it. Default: "
            "one for each core available to the process; 1 with a GPU.",
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=512,
            help="Size of the KV cache in tokens. Default: 64 texts of the model's context, on a CPU of at most "
            "1,024 tokens each; at least one full context, at most half of the free memory.",
        ),
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Maximum open sessions; further ones are refused.")] = 256,
    max_sessions_per_client: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum open sessions per client certificate, or per host without certificates; further ones are "
            "refused. Default: only --max-sessions applies.",
        ),
    ] = None,
    *,
    server: ServerSettings,
) -> None:
    """Serve a draft model: propose candidates ahead of the target."""
    set_memory_policy()

    def start() -> DraftServicer:
        placement = Placement(engine, dtype, device, kv_tokens, sessions=max_sessions, is_draft=True)
        (directory,) = check(Wanted(model, placement))
        loaded = load_engine(directory, placement, threads=(threads or threads_for(device),))
        fast_paths.log_off()
        limits = DraftLimits(max_sessions=max_sessions, max_sessions_per_client=max_sessions_per_client)
        # A session's slots hold its text and its nodes.
        identity = identity_of(directory, loaded, loaded.capacity - 1 - limits.max_nodes)
        width = expansion_width.measured(loaded, limits.defaults.max_branches)
        log.info("expansion_width", nodes_of_a_session_in_a_step=width.of_session, nodes_in_a_step=width.of_all)
        drafter = LanguageModelDrafter(
            loaded, rows=width.of_all, rows_per_session=width.of_session, times=PassTimes(width.seconds)
        )
        loop = DraftLoop(drafter)
        loop.start()
        grammars = GrammarCompiler.of(directory)
        grammars.prepare()
        return DraftServicer(loop, identity, limits, pod_info(loaded), grammars, GrammarTrials(directory.path))

    run(server, lambda: in_a_thread_of_its_own(start), "draft")


if __name__ == "__main__":
    run_command(main, service="draft")
