"""`python -m draft_service`: serve a draft model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from specdec.extras import needed_by

with needed_by("draft", "draft"):
    import structlog
    import typer

    from draft_service.draft_loop import DraftLoop
    from draft_service.forgotten import Forgotten
    from draft_service.language_model import LanguageModelDrafter
    from draft_service.learning_servicer import MIN_KEY_CHARACTERS, Learning
    from draft_service.pass_times import measured_width
    from draft_service.request import MIN_PROBABILITY, ExpansionPolicy
    from draft_service.servicer import DraftLimits, DraftServicer
    from draft_service.traffic import MAX_KEPT_TOKENS, Traffic
    from draft_service.translation import Translation
    from draft_service.version_folder import FoundVersion, VersionsFolder
    from draft_service.version_follower import VersionFollower
    from draft_service.version_loading import LoadedVersion, VersionLoader
    from draft_service.version_trial import TrialLimits
    from draft_service.versions import HAS_LEARNED, VersionedDrafter
    from specdec import ports
    from specdec.command_line import number, run_command
    from specdec.decoding.speculation import Scorer
    from specdec.engine import fast_paths
    from specdec.engine.cpu_count import threads_for
    from specdec.engine.engines.loading import load_engine
    from specdec.engine.gguf_file import open_model
    from specdec.engine.heads.files import TargetShape
    from specdec.engine.heads.kinds import feature_heads_in, memory_of_draft_heads
    from specdec.engine.learned_from import LearnedFrom
    from specdec.engine.memory import set_memory_policy
    from specdec.engine.model_directory import ModelDirectory
    from specdec.engine.placement import DraftKind, Placement, WantedDtype
    from specdec.engine.preflight.check import Wanted, check
    from specdec.grammar.compiler import GrammarCompiler
    from specdec.serving.grammar_trials import GrammarTrials
    from specdec.serving.identity import identity_of, pod_info
    from specdec.serving.process.options import Device, KvTokens, MaxSessions, MaxSessionsPerClient, Threads, serving
    from specdec.serving.process.server import ServerSettings, in_temporary_thread, run
    from specdec.serving.validation import MAX_BRANCHES, MAX_DEPTH, MAX_NODES, expansion_violations
    from specdec.serving.watched import Watched
    from specdec.wire.speculation import ScorerName

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
    target_tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the target, if its tokenizer is not the draft's: its configuration and tokenizer files. "
            "The draft then proposes the tokens that both have.",
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of EAGLE-3 heads, a block draft (DFlash, DSpark) or an MTP layer, run in place of a draft "
            "model. --model is then the heads' target, of which only configuration, tokenizer, token embeddings and "
            "output head are read. Verifiers need --features DIR. Needs --engine torch. Default: a draft model.",
        ),
    ] = None,
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
    device: Device = "cpu",
    threads: Threads = None,
    kv_tokens: KvTokens = None,
    max_sessions: MaxSessions = 256,
    max_sessions_per_client: MaxSessionsPerClient = None,
    branches: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_BRANCHES,
            help="Default `max_branches`: maximum children of a node. Under REJECTION the default is 1.",
        ),
    ] = ExpansionPolicy.max_branches,
    depth: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_DEPTH,
            help="Default `max_depth`: tokens ahead of the last committed one that a step verifies. Drafting continues "
            "beyond them, since a commit may be under way.",
        ),
    ] = ExpansionPolicy.max_depth,
    max_branches: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_BRANCHES, help="Limit on requested `max_branches`; larger values are reduced to it."
        ),
    ] = MAX_BRANCHES,
    max_depth: Annotated[
        int, typer.Option(min=1, max=MAX_DEPTH, help="Limit on requested `max_depth`; larger values are reduced to it.")
    ] = MAX_DEPTH,
    max_nodes: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_NODES,
            help="Maximum live candidates of a session; memory for them is reserved. A larger requested `max_nodes` is "
            "reduced to this.",
        ),
    ] = MAX_NODES,
    min_path_probability: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.999,
            help="Pruning threshold: nodes with a smaller path probability are not expanded. Requests may name a "
            "higher one.",
        ),
    ] = MIN_PROBABILITY,
    scorer: Annotated[
        ScorerName,
        typer.Option(
            help="How candidates are scored, unless a request names a scorer: by probabilities calibrated to what the "
            "target has accepted, or by the draft's own."
        ),
    ] = "calibrated",
    expansion: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Fixed widths of the token tree, as in SpecInfer: number of children of a node by its depth, as in "
            "4,2,1, unless a request names a tree. Default: by probability.",
        ),
    ] = "",
    learn_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_KEPT_TOKENS,
            help="Keep this many tokens of texts whose requests permit it (`learn`), in memory, for `specdec "
            "train-draft --traffic`. 0 keeps nothing.",
        ),
    ] = 0,
    learn_logprobs_mb: Annotated[
        int,
        typer.Option(
            min=0,
            max=1 << 16,
            help="With --learn-tokens: also keep this many MB of the target's log-probabilities where it overruled the "
            "draft, 388 bytes a place. 0 keeps none, and verifiers compute none.",
        ),
    ] = 64,
    learn_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the key of callers that may read and delete what is kept, and forget tenants: one line of "
            "at least 16 printable ASCII characters. Needed with --learn-tokens; with --versions alone, "
            "`specdec forget` then only excludes versions.",
        ),
    ] = None,
    versions: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of new versions of the draft: a directory in it with a file COMPLETE, or an export, is tried "
            "without a restart. Default: none are tried.",
        ),
    ] = None,
    canary: Annotated[
        float,
        number("With --versions: share of new sessions that a version on trial drafts for.", min=0.001, max=0.5),
    ] = TrialLimits.share,
    canary_tokens: Annotated[
        int,
        typer.Option(
            min=1000,
            help="With --versions: tokens committed in a version's sessions after which its trial ends undecided.",
        ),
    ] = TrialLimits.tokens,
    canary_alpha: Annotated[
        float,
        number(
            "With --versions: probability of a wrong verdict: promoting a version that is not better, or rolling "
            "back, as worse, a version that is not.",
            min=1e-6,
            max=0.5,
        ),
    ] = TrialLimits.alpha,
    canary_slowdown: Annotated[
        float,
        number(
            "With --versions: maximum duration of a version's pass, as a multiple of the serving version's.",
            min=1.0,
            max=100.0,
        ),
    ] = TrialLimits.max_slowdown,
    *,
    server: ServerSettings,
) -> None:
    """Serve a draft model: propose candidates ahead of the target."""
    if versions is not None and engine != "onnx" and device != "cpu":
        needed = f"needs --engine onnx or --device cpu: --engine {engine} on {device}"
        raise typer.BadParameter(f"{needed} cannot load a model while it runs passes", param_hint="--versions")
    if heads is not None:
        others = {
            "--target-tokenizer": target_tokenizer is not None,
            "--versions": versions is not None,
            "--learn-tokens": learn_tokens > 0,
        }
        if engine != "torch":
            raise typer.BadParameter(f"needs --engine torch, not {engine}", param_hint="--heads")
        if given := [option for option, is_given in others.items() if is_given]:
            raise typer.BadParameter("is for draft models, not for --heads", param_hint=given[0])
    set_memory_policy()
    key = learning_key(learn_key_file, keeps=learn_tokens > 0, tries=versions is not None)
    limits = DraftLimits(
        defaults=default_policy(
            max_nodes=max_nodes,
            depth=("--depth", depth, "--max-depth", max_depth),
            branches=("--branches", branches, "--max-branches", max_branches),
            min_path_probability=min_path_probability,
            scorer=Scorer[scorer.upper()],
            expansion=expansion,
        ),
        max_nodes=max_nodes,
        max_depth=max_depth,
        max_branches=max_branches,
        max_sessions=max_sessions,
        max_sessions_per_client=max_sessions_per_client,
    )

    def start() -> DraftServicer:
        folder = None if versions is None else Watched(VersionsFolder(versions))  # fails before the model is loaded
        forgotten = Forgotten(versions)
        placement = Placement(engine, dtype, device, kv_tokens, sessions=max_sessions, is_draft=True)
        used_threads = threads or threads_for(device)
        if heads is not None:
            (target,) = check(Wanted(model, placement, heads=partial(memory_of_draft_heads, heads)))
            return heads_servicer(heads, target, placement, used_threads, limits)
        (directory,) = check(Wanted(model, placement))
        return language_model_servicer(
            directory,
            placement,
            used_threads,
            limits,
            target_tokenizer=target_tokenizer,
            forgotten=forgotten,
            kept=Traffic(learn_tokens, forgotten, most_bytes=learn_logprobs_mb << 20) if learn_tokens else None,
            key=key,
            folder=folder,
            trial=TrialLimits(canary, canary_tokens, canary_alpha, canary_slowdown),
        )

    run(server, lambda: in_temporary_thread(start), "draft")


def language_model_servicer(
    directory: ModelDirectory,
    placement: Placement,
    threads: int,
    limits: DraftLimits,
    *,
    target_tokenizer: Path | None,
    forgotten: Forgotten,
    kept: Traffic | None,
    key: str | None,
    folder: Watched[tuple[FoundVersion, ...]] | None,
    trial: TrialLimits,
) -> DraftServicer:
    """Return the servicer of a draft service that runs a draft model. `kept` keeps texts to learn from; callers of
    LearningService must present `key`; versions in `folder` are tried within the limits `trial`. None turns each
    off."""
    learned_from = LearnedFrom.of(directory.path)
    if forgotten.concerns(learned_from):
        log.warning("model_concerned", model=directory.name, why=HAS_LEARNED, remedy="give another --model")
    loaded = load_engine(directory, placement, threads=(threads,))
    fast_paths.log_off()
    # A session's slots hold its text and its nodes.
    identity = identity_of(directory, loaded, loaded.capacity - 1 - limits.max_nodes)
    target, translation = translated(directory, target_tokenizer)
    identity.tokenizer_fingerprint, identity.vocabulary_size = target.tokenizer_fingerprint, target.vocabulary
    branches = limits.defaults.max_branches
    width = measured_width(loaded, directory.context, branches)
    log.info("expansion_width", nodes_of_a_session_in_a_step=width.of_session, nodes_in_a_step=width.of_all)
    drafter = LanguageModelDrafter.of(loaded, width, translation=translation, context=directory.context)
    versioned = None
    if folder is not None:
        fingerprint = identity.model_fingerprint
        first = LoadedVersion(drafter, fingerprint, drafter.times, width.of_all, learned_from=learned_from)
        versioned = VersionedDrafter(directory.name, first, trial, forgotten)
    loop = DraftLoop(versioned or drafter, kept)
    loop.start()
    grammars, trials = grammars_of(target)
    follower = None
    if folder is not None and versioned is not None:
        placed = replace(placement, kv_tokens=loaded.capacity)
        context, slowdown = identity.context_tokens, trial.max_slowdown
        loader = VersionLoader(directory, context, placed, threads, branches, slowdown, translation)
        follower = VersionFollower(folder, loader, loop, versioned, directory.path)
        follower.start()
    info, learning = pod_info(loaded), None if key is None else Learning(key, forgotten, learned_from)
    return DraftServicer(loop, identity, limits, info, grammars, trials, translation, learning, follower)


def heads_servicer(
    heads: Path, target: ModelDirectory, placement: Placement, threads: int, limits: DraftLimits
) -> DraftServicer:
    """Return the servicer of a draft service that runs the heads in a directory."""
    files = feature_heads_in(heads, TargetShape.of(target))
    from draft_service.heads_loading import load_heads  # imports torch

    loaded = load_heads(files, target, placement, threads)
    loop = DraftLoop(loaded.drafter)
    loop.start()
    return DraftServicer(loop, loaded.identity, limits, loaded.info, *grammars_of(target))


def grammars_of(target: ModelDirectory) -> tuple[GrammarCompiler, GrammarTrials]:
    """Return the prepared compiler of grammars, and the trials of new ones."""
    compiler = GrammarCompiler.of(target)
    compiler.prepare()
    return compiler, GrammarTrials(target.path)


def translated(draft: ModelDirectory, path: Path | None) -> tuple[ModelDirectory, Translation | None]:
    """Return the model whose tokens the draft proposes, and a translation if its tokenizer differs from the draft's."""
    target = draft if path is None else open_model(path)
    if target.tokenizer_fingerprint == draft.tokenizer_fingerprint:
        return draft, None
    translation = Translation(draft, target)
    log.info("tokens_in_common", target=str(target.path), tokens=len(translation.common), of=target.vocabulary)
    return target, translation


def learning_key(file: Path | None, *, keeps: bool, tries: bool) -> str | None:
    """Return the key that callers of LearningService must present; None if that service is not served.
    typer.BadParameter names the invalid option. `keeps`: texts are kept; `tries`: versions are tried."""
    if file is None and keeps:
        raise typer.BadParameter("is needed with --learn-tokens", param_hint="--learn-key-file")
    if file is None or not (keeps or tries):
        return None
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "is not ASCII"
        raise typer.BadParameter(f"{file}: {problem}", param_hint="--learn-key-file") from None
    if len(key) < MIN_KEY_CHARACTERS or not key.isprintable():
        problem = (
            f"{file}: has {len(key)} characters, must have one line of at least {MIN_KEY_CHARACTERS} printable ones"
        )
        raise typer.BadParameter(problem, param_hint="--learn-key-file")
    return key


def default_policy(
    *,
    max_nodes: int,
    depth: tuple[str, int, str, int],
    branches: tuple[str, int, str, int],
    min_path_probability: float,
    scorer: Scorer,
    expansion: str,
) -> ExpansionPolicy:
    """Return the default policy of sessions. `depth` and `branches` each hold an option, its value, the option that
    limits it, and that limit. typer.BadParameter names the invalid option."""
    for option, value, of_limit, most in (depth, branches):
        if value > most:
            raise typer.BadParameter(f"is {value}, must be at most {most} ({of_limit})", param_hint=option)
    words = [word.strip() for word in expansion.split(",")] if expansion else []
    if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 4)]:
        raise typer.BadParameter(
            f"has {wrong[0]!r}, must be comma-separated numbers of children", param_hint="--expansion"
        )
    widths = tuple(map(int, words))
    for field, problem in expansion_violations("", widths):
        depth_of_it = f"at depth {int(field.strip('[]')) + 1} it " if field else ""
        raise typer.BadParameter(f"is {expansion}: {depth_of_it}{problem}", param_hint="--expansion")
    return ExpansionPolicy(max_nodes, depth[1], branches[1], min_path_probability, scorer, widths)


if __name__ == "__main__":
    run_command(main, service="draft")
