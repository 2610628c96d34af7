"""Preparation of a draft's training: its models and texts, to begin or to resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specdec.engine.hf.random_weights import RandomWeights
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom
from specdec.engine.model_directory import ModelDirectory
from specdec.text.tokenizer import Tokenizer
from specdec.training.draft import DraftOrigin, DraftPlan, DraftTraining
from specdec.training.draft_files import DraftFiles, dtype_of_weights
from specdec.training.files import STATE, clear, make_folder, replace_json
from specdec.training.given_draft import GivenDraft
from specdec.training.models import check_positions, kept_for_gradients, load_draft, load_target
from specdec.training.own_text import OwnText, TrainingText
from specdec.training.plan import check_unfinished, write_plan
from specdec.training.served_labels import ServedLabels, ServedTraining, TextWindows
from specdec.training.texts import Mixture, Windows, digest_of, tokens_of
from specdec.training.traffic import TrainingTraffic
from specdec.training.training import check_room

REPLAY_SHARE = 0.25
"""Default fraction of older text in a batch, if there is older text."""

Served = tuple[ServedLabels, TextWindows]
"""Labels from serving, and their windows."""


@dataclass(frozen=True)
class DraftOptions:
    """The texts of a training, and its device. When resuming, None means the value at the beginning."""

    files: Sequence[Path]  # when resuming, none or the same as at the beginning
    own_tokens: int | None  # written by the target
    replay: Sequence[Path]  # older text; when resuming, none or the same as at the beginning
    replay_share: float | None
    device: str
    traffic: TrainingTraffic | None = None  # additional texts, kept by draft services
    served_labels: bool = False  # learn from the target's choices in serving; no step runs the target


class PreparedDraft:
    """A training of a draft with its models loaded: first the target writes `own_text`, then comes the `training`."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        text: TrainingText,
        plan: DraftPlan,
        origin: DraftOrigin,
        files: DraftFiles,
        learned_from: LearnedFrom | None = None,
        traffic: TrainingTraffic | None = None,
        served: Served | None = None,
    ) -> None:
        """`learned_from`: tenants whose texts the draft learns from, and tenants that it has learned from before; None:
        there are none. `served`: labels from serving and their windows; the draft then learns only from these, and all
        of `text` is held out."""
        self._served = served
        self.text = text
        self._traffic = traffic
        self._learned_from = learned_from
        self.own_text = OwnText(target, text, plan, origin.own_tokens)
        self._target, self._draft = target, draft
        self._plan, self._origin, self._files = plan, origin, files

    def training(self, out: Path) -> DraftTraining:
        """Return the training, at its beginning or where the one in `out` stopped. The draft's acceptance before
        training is measured."""
        given = self._plan, self._origin, self._files
        if self._served is None:
            mixture = self.text.mixture(self._plan.length, self._files.draft.vocabulary, self._origin.replay_share)
            training = DraftTraining(self._target, self._draft, mixture, *given)
        else:
            mixture = Mixture(Windows(self.text.given, self._plan.length, all_held_out=True))
            training = ServedTraining(self._target, self._draft, mixture, *given, *self._served)
        if (out / STATE).is_file():
            training.resume(out)
        training.measure_before()
        training.resumable = self._traffic is None  # a saved state would contain the texts
        if self._learned_from is not None:  # before the weights, which must never be without it
            make_folder(out)
            replace_json(out / LEARNED_FROM, self._learned_from.content)
        training.save(out)
        return training


def prepared(
    target: ModelDirectory, draft: GivenDraft, options: DraftOptions, plan: DraftPlan, out: Path, *, resume: bool
) -> PreparedDraft:
    """Return a training to begin, or to resume where the one in `out` stopped. Afterwards `out` has everything needed
    to resume, unless the training uses traffic. ModelDirectoryError or UnsupportedModelError, with a one-line message,
    if a file has no usable text, the models have no room, or `out` has nothing to resume; WriteError if `out` cannot be
    written."""
    learned_from = None if isinstance(draft.directory, RandomWeights) else LearnedFrom.of(draft.directory.path)
    if options.traffic is not None:
        learned_from = (learned_from or LearnedFrom()).with_texts(options.traffic.tenants)
    served: Served | None = None
    text_digest = digest_of(options.files) if options.files else None
    replay_digest = digest_of(options.replay) if options.replay else None
    models = {
        "target": target.name,
        "target_fingerprint": target.model_fingerprint,
        "draft": draft.directory.name,
        "draft_fingerprint": draft.fingerprint,
    }
    if resume:
        origin = check_unfinished(
            out,
            DraftTraining.trains,
            plan,
            DraftOrigin,
            **models,
            text=text_digest,
            own_tokens=options.own_tokens,
            replay=replay_digest,
            replay_share=options.replay_share,
        )
        text = TrainingText.kept(out)
    else:
        share = REPLAY_SHARE if options.replay_share is None else options.replay_share
        origin = DraftOrigin(
            **models,
            text=text_digest or "",
            own_tokens=options.own_tokens or 0,
            replay=replay_digest or "",
            replay_share=share if options.replay else 0.0,
        )
        text, served = _texts(target, draft, options, plan)
    big, small = load_target(target, options.device), load_draft(draft.directory, options.device)
    if isinstance(draft.directory, RandomWeights):
        check_positions(small, draft.directory, plan.length)
    check_room(
        draft.directory.name,
        [*small.parameters()],
        plan,
        max(target.vocabulary, draft.directory.vocabulary),
        kept_for_gradients(small, plan.length),
        options.device,
        "use a smaller draft, or a smaller --length",
    )
    if not resume:
        clear(out)
        text.save(out)
        if options.traffic is None:
            write_plan(out, DraftTraining.trains, plan, origin)
    files = DraftFiles(draft.directory, draft.tokenizer, dtype_of_weights(draft.directory))
    return PreparedDraft(big, small, text, plan, origin, files, learned_from, options.traffic, served)


def _texts(
    target: ModelDirectory, draft: GivenDraft, options: DraftOptions, plan: DraftPlan
) -> tuple[TrainingText, Served | None]:
    """Return the texts of a new training, and the labels from serving if it learns from these; TextError, naming the
    option, if they are unusable."""
    served: Served | None = None
    tokenizer, end = Tokenizer(target), min(target.end_tokens, default=None)
    given, replay = (tokens_of(files, tokenizer, end) for files in (options.files, options.replay))
    if options.traffic is not None and options.served_labels:
        learned, held_out = options.traffic.parted(plan.length)
        learned.check(draft.directory.vocabulary)
        served = learned.labels(plan.overruled), TextWindows(learned.positions, plan.length)
        given = held_out.tokens(end)
    elif options.traffic is not None:
        given = torch.cat([given, options.traffic.tokens(end)])
    own = torch.empty(0, plan.length, dtype=torch.int64)
    text = TrainingText(given, replay, own, own, in_memory=options.traffic is not None)
    option = "--traffic" if options.traffic is not None and not len(options.files) else "--text"
    text.check(plan.length, draft.directory.vocabulary, "draft", option)  # before the models are loaded
    return text, served
