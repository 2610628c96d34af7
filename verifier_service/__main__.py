"""`python -m verifier_service`: serve a target model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from specdec.extras import needed_by

with needed_by("verifier", "verifier"):
    import typer

    from specdec import ports
    from specdec.command_line import run_command
    from specdec.decoding.lookahead import Lookahead
    from specdec.decoding.speculation import CandidateSource, SpeculationOptions
    from specdec.engine import fast_paths, start_phases
    from specdec.engine.cpu_count import MAX_THREADS, threads_for
    from specdec.engine.engine import LazyMemory, touch_memory
    from specdec.engine.engines.loading import load_engine
    from specdec.engine.heads.kinds import memory_of_features, memory_of_heads
    from specdec.engine.memory import set_memory_policy
    from specdec.engine.placement import Kind, Placement, WantedDtype, Weights
    from specdec.engine.preflight.check import Beside, Wanted, check
    from specdec.engine.preflight.device import check_launcher
    from specdec.engine.preflight.dtype import dtype_of
    from specdec.engine.vllm.options import MAX_SEQUENCES, MAX_STEP_ROWS, read_options
    from specdec.grammar.compiler import GrammarCompiler
    from specdec.serving.grammar_trials import GrammarTrials
    from specdec.serving.identity import identity_of, pod_info
    from specdec.serving.messages import speculation_from
    from specdec.serving.process.options import Device, KvTokens, MaxSessions, MaxSessionsPerClient, Threads, serving
    from specdec.serving.process.server import ServerSettings, in_temporary_thread, run
    from specdec.serving.validation import MAX_CANDIDATES, MAX_WINDOW_ROWS, lookahead_violations
    from specdec.wire.speculation import OWN_NAMES, SPECULATIONS, SpeculationName
    from verifier_service.heads_files import MAX_FEATURE_WINDOW, feature_source, read_heads
    from verifier_service.proposers.draft_model import DraftModelProposer
    from verifier_service.servicer import VerifierLimits, VerifierServicer
    from verifier_service.step_loop import StepLoop


@serving(ports.VERIFIER)
def main(
    model: Annotated[
        Path,
        typer.Option(
            help="Directory of the target model in Hugging Face's layout (config.json, tokenizer.json, *.safetensors); "
            "or a GGUF file, converted on first use."
        ),
    ],
    dtype: Annotated[
        WantedDtype,
        typer.Option(
            help="Data type of the target; float16 is for GPUs. auto: the checkpoint's, if the device computes it "
            "fast, else float32; with --engine onnx, the export's."
        ),
    ] = "auto",
    device: Device = "cpu",
    weights: Annotated[
        Weights,
        typer.Option(
            help="stored: the target's weights as they are. int8, int4: quantised at start, for the torch engine on a "
            "CPU: less memory and faster steps of few rows, but tokens differ from the stored weights'. Needs onnx and "
            "onnxruntime."
        ),
    ] = "stored",
    engine: Annotated[
        Kind,
        typer.Option(
            help="torch: specdec's own engine for the device. eager: the model's own layers, slow, for comparison. "
            "onnx: ONNX Runtime, which exports the model on first use and is never exact. vllm: vLLM runs the model "
            "with its kernels and quantisations, on one device or several, and verifies chains of candidates, not "
            "trees."
        ),
    ] = "torch",
    threads: Threads = None,
    threads_while_drafting: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_THREADS,
            help="CPU threads of forward passes while a draft works, or while another program slows them down. Set "
            "fewer than --threads on a shared machine. Default: --threads.",
        ),
    ] = None,
    kv_tokens: KvTokens = None,
    max_sessions: MaxSessions = 512,
    max_sessions_per_client: MaxSessionsPerClient = None,
    max_waiting: Annotated[
        int,
        typer.Option(min=1, help="Maximum sessions waiting for their first KV cache blocks; further ones are refused."),
    ] = 128,
    step_rows: Annotated[
        int,
        typer.Option(
            min=8,
            help="Maximum rows (tokens) of a step with prefill; a step exceeds it only to give each prompt one row, or "
            "if decoding sessions nearly fill it. Steps of prompts alone stop at the size above which rows get no "
            "cheaper, as measured at start-up.",
        ),
    ] = 512,
    max_candidates: Annotated[
        int,
        typer.Option(min=1, max=MAX_CANDIDATES, help="Maximum candidates that a step verifies for one session."),
    ] = VerifierLimits.max_candidates,
    speculation: Annotated[
        SpeculationName,
        typer.Option(
            help="Drafters for requests that name none. auto: all, when they pay. Other values (draft, always, "
            f"local, off, or a single one of {OWN_NAMES}, jacobi): as for `specdec generate`."
        ),
    ] = "auto",
    lookahead: Annotated[
        tuple[int, int, int] | None,
        typer.Option(
            metavar="W N G",
            help="Lookahead window for requests that name neither drafters nor a window, used even at a loss: W "
            "positions, n-grams of N tokens, G guesses. Default: a size that pays, if any.",
        ),
    ] = None,
    jacobi: Annotated[
        int | None, typer.Option(metavar="W", help="Jacobi decoding in place of --lookahead: the same as W 2 1.")
    ] = None,
    max_window_rows: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_WINDOW_ROWS,
            help="Maximum rows (tokens) that a requested lookahead window adds to a step; larger ones are refused.",
        ),
    ] = MAX_WINDOW_ROWS,
    rejection: Annotated[
        Literal["block", "token"],
        typer.Option(
            help="How the REJECTION rule tests a chain of draws. block: as a whole, which accepts at least as many "
            "(block verification, Sun et al. 2024). token: one by one (Leviathan et al. 2023), for comparison. The "
            "distribution of tokens is the target's either way."
        ),
    ] = "block",
    suffix_cache_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=1 << 17,
            help="Size of each tenant's suffix cache in tokens: its latest finished texts, which n-gram lookup "
            "searches. Its requests then also share the n-grams of their lookahead windows. 0 turns it off.",
        ),
    ] = 0,
    exact: Annotated[
        bool,
        typer.Option(
            help="Exact numerics: a token's logits have the same bits whatever else is in its step. The "
            "verifier checks this at start-up and warns if it does not hold."
        ),
    ] = True,
    compile: Annotated[
        bool,
        typer.Option(
            help="Have vLLM compile the model's layers: start-up takes half a minute longer, and steps are faster. For "
            "--engine vllm on the CPU; needs a C++ compiler."
        ),
    ] = False,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            help="Capture steps as CUDA graphs, launched in one call; without them the host launches every kernel "
            "separately, slow, for comparison. For the torch engine and vLLM on a GPU."
        ),
    ] = True,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a local draft, or its GGUF file: a small model run by the verifier itself between "
            "steps, for machines where a draft service would take cores from the target. Default: none."
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            help="Directory of Medusa or EAGLE-3 heads or of a block draft (DFlash, DSpark), trained for the target, "
            "or their file of weights; or the target's own directory, if it has an MTP layer. They propose candidates "
            "between steps, in place of a local draft. Default: none."
        ),
    ] = None,
    heads_tree: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the tree of Medusa --heads, a list of paths of ranks such as [[0], [0, 0], [1]]. "
            "Default: the likeliest candidates of each text."
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the heads that draft services run (`specdec draft --heads`): the verifier sends "
            "these services the target's features that the heads read. Cannot be combined with --heads. Default: none.",
        ),
    ] = None,
    feature_window: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_FEATURE_WINDOW,
            help="With --features: rows kept of each text, for drafts that begin in the middle of it. A row takes 2 "
            "bytes times the width of the heads.",
        ),
    ] = 256,
    vllm_options: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="With --engine vllm: engine options by their names in vllm.EngineArgs, such as "
            '\'{"tensor_parallel_size": 4, "quantization": "fp8"}\'.',
        ),
    ] = "{}",
    *,
    server: ServerSettings,
) -> None:
    """Serve a target model: verify candidates and decide every token."""
    set_memory_policy()
    try:
        for_vllm = read_options(vllm_options)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--vllm-options") from None
    on_vllm, no_states = engine == "vllm", engine in ("vllm", "onnx")
    limit = "is {}, must be at most {} with --engine vllm"
    no_windows = "needs lookahead windows, which vLLM's engine lacks"
    for option, refused, problem in (
        ("--vllm-options", for_vllm and not on_vllm, f"is for --engine vllm, not for {engine}"),
        ("--step-rows", on_vllm and step_rows > MAX_STEP_ROWS, limit.format(step_rows, MAX_STEP_ROWS)),
        ("--max-sessions", on_vllm and max_sessions > MAX_SEQUENCES, limit.format(max_sessions, MAX_SEQUENCES)),
        ("--draft-model", draft_model and on_vllm, "cannot be used with --engine vllm, which runs only one model"),
        ("--heads", heads and no_states, f"{engine} gives no hidden states; use --engine torch"),
        ("--heads", heads and draft_model, "cannot be combined with --draft-model: heads take its place"),
        ("--features", features and no_states, f"{engine} gives no features of layers; use --engine torch"),
        ("--features", features and heads, "cannot be combined with --heads: draft services run the heads"),
        ("--heads-tree", heads_tree and not heads, "needs --heads"),
        ("--speculation", speculation == "heads" and not heads, "heads needs --heads"),
        ("--speculation", speculation == "local_model" and not draft_model, "local_model needs --draft-model"),
        ("--speculation", on_vllm and speculation in ("lookahead", "jacobi"), no_windows),
    ):
        if refused:
            raise typer.BadParameter(problem, param_hint=option)
    own_model = "--heads" if heads is not None else "--draft-model" if draft_model is not None else None
    by_default = default_speculation(speculation, lookahead, jacobi, max_window_rows, own_model)
    if engine == "vllm" and (by_default.lookahead is not None or by_default.jacobi):
        raise typer.BadParameter(no_windows, param_hint="--lookahead" if jacobi is None else "--jacobi")

    memory_beside: Beside | None = None
    if heads is not None:
        memory_beside = partial(memory_of_heads, heads)
    elif features is not None:
        memory_beside = partial(memory_of_features, features)

    def start() -> VerifierServicer:
        check_launcher()
        target = Placement(engine, dtype, device, kv_tokens, compile, max_sessions, weights=weights)
        draft_placement = replace(target, beside=True, weights="stored")
        directory, *drafts = check(
            Wanted(model, target),
            *([] if draft_model is None else [Wanted(draft_model, draft_placement)]),
            beside=memory_beside,
        )
        files = None if heads is None else read_heads(heads, heads_tree, directory)
        most = threads or threads_for(device)
        counts = most, most if threads_while_drafting is None else min(most, threads_while_drafting)
        promised, promised_a_slot = 0, 0  # memory for the heads or their fusion, loaded after the KV cache
        if memory_beside is not None:
            promised, promised_a_slot = memory_beside(directory, dtype_of(directory, target), kv_tokens).owed
        loaded = load_engine(
            directory,
            target,
            threads=counts,
            exact=exact,
            cuda_graphs=cuda_graphs,
            vllm_options=for_vllm,
            promised=promised,
            promised_a_slot=promised_a_slot,
        )
        if exact and not loaded.exact:
            fast_paths.found_off(
                "exactness",
                f"logits depend on the batch here ({loaded.numerics})",
                "a token may depend on the other sessions in its step",
            )
        if engine == "vllm" and threads_while_drafting is not None:
            fast_paths.found_off(
                "threads while drafting",
                "vLLM's number of threads is fixed",
                "a draft on this machine gets no core of its own: use fewer --threads",
            )
        local_draft = None
        for draft in drafts:
            lazy = loaded.lazy_bytes if isinstance(loaded, LazyMemory) else 0
            small = load_engine(draft, draft_placement, threads=counts, cuda_graphs=cuda_graphs, promised=lazy)
            local_draft = DraftModelProposer(small, draft.context)
        loop = StepLoop(
            loaded,
            step_rows=step_rows,
            suffix_cache_tokens=suffix_cache_tokens,
            draft_model=local_draft,
            heads=None if files is None else files.load(loaded),
            features=None if features is None else feature_source(features, feature_window, directory, loaded),
            block_verification=rejection == "block",
        )
        loop.start()
        grammars = GrammarCompiler.of(directory)
        with start_phases.phase("grammars"):
            grammars.prepare()
        start_phases.log_end()
        touch_memory([loaded] if local_draft is None else [loaded, local_draft.engine])
        fast_paths.log_off()
        limits = VerifierLimits(
            max_candidates=max_candidates,
            max_sessions=max_sessions,
            max_sessions_per_client=max_sessions_per_client,
            max_waiting=max_waiting,
            max_window_rows=max_window_rows,
            speculation=by_default,
        )
        identity = identity_of(directory, loaded, loop.context)
        return VerifierServicer(loop, identity, limits, pod_info(loaded), grammars, GrammarTrials(directory.path))

    run(server, lambda: in_temporary_thread(start), "verifier")


def default_speculation(
    name: SpeculationName,
    lookahead: tuple[int, int, int] | None,
    jacobi: int | None,
    most_rows: int,
    model_option: str | None = None,
) -> SpeculationOptions:
    """Return the default speculation of requests; typer.BadParameter names the wrong option. `model_option`: "--heads"
    or "--draft-model", if given."""
    if lookahead is not None and jacobi is not None:
        raise typer.BadParameter("cannot be combined with --lookahead: both set the window size", param_hint="--jacobi")
    options = speculation_from(SPECULATIONS[name])
    if jacobi is not None:
        size, option, given = Lookahead(jacobi, 2, 1), "--jacobi", str(jacobi)
    elif lookahead is not None:
        size, option, given = Lookahead(*lookahead), "--lookahead", " ".join(map(str, lookahead))
    else:
        return options
    problems = []
    if CandidateSource.LOOKAHEAD not in options.drafters:
        problems.append(f"is {given}, but --speculation {name} uses no lookahead windows")
    if name in ("auto", "local") and model_option is not None:
        problems.append(
            f"would replace {model_option} in every request; with --speculation lookahead, requests can still ask for "
            f"{model_option}"
        )
    for field, problem in lookahead_violations("", size, most_rows):
        part = {".window": "W", ".ngram": "N", ".guesses": "G"}.get(field)
        if part is None and jacobi is not None:
            problems.append(f"is {given}, must be at most {most_rows + 1} (--max-window-rows {most_rows})")
        elif part is None:
            rows = f"adds {size.most_rows} tokens to a step, must add at most {most_rows} (--max-window-rows)"
            problems.append(f"is {given}: {rows}")
        else:
            problems.append(problem if jacobi is not None else f"is {given}: {part} {problem}")
    if options.jacobi and size.ngram != 2:
        problems.append(f"is {given}: N is {size.ngram}, must be 2 with --speculation jacobi")
    if problems:
        raise typer.BadParameter(problems[0], param_hint=option)
    return replace(options, lookahead=size)


if __name__ == "__main__":
    run_command(main, service="verifier")
