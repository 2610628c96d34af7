"""A proposer for vLLM (`method` "custom_class" in its speculative configuration) with candidates from draft services.

vLLM calls it after each step and verifies its candidates in the next one. Drafts work while the target computes, so
candidates usually arrive in time; a step waits for them for a limited time (`settings.py`). Drafts affect only speed,
because vLLM's own rejection sampler decides acceptance. If continuous measurement (`worth.py`) shows that proposals
slow texts down, none are made.

This kind of proposer returns tokens without probabilities. At temperature 0 a candidate is accepted if it is the
target's choice; with sampling, its acceptance probability is its probability under the target. So drafts send their
likeliest tokens.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from specdec.engine.model_directory import ModelDirectory
from specdec.vllm.drafts import Drafts, Target
from specdec.vllm.settings import VllmDraftSettings
from specdec.vllm.texts import TextTable
from specdec.vllm.worth import Worth

log = structlog.get_logger()

MAX_MISTAKES = 8
"""Number of errors in proposing, caused by bugs here, after which proposing is turned off."""

REMEMBERED_STEPS = 64
"""Number of steps after which a text that is missing from the batch counts as ended."""


class RemoteDraft:
    """Proposes candidates from draft services for vLLM's texts. Used by one thread of vLLM's worker."""

    def __init__(self, vllm_config: Any, worth: Worth | None = None) -> None:
        """`vllm_config` is vLLM's, `worth` decides when to propose. Raises the errors of `VllmDraftSettings.of`, and
        ModelDirectoryError for the target's directory."""
        settings = VllmDraftSettings.of()
        model = vllm_config.model_config
        self._depth: int = vllm_config.speculative_config.num_speculative_tokens
        # vLLM uses the proposals of only one tensor-parallel rank, so only that rank asks drafts.
        self._asks = vllm_config.parallel_config.rank % vllm_config.parallel_config.tensor_parallel_size == 0
        directory = ModelDirectory(_local(model.model, model.revision))
        context = int(model.max_model_len)
        self._texts = TextTable(directory.vocabulary, context, directory.end_tokens)
        target = Target(
            directory.tokenizer_fingerprint, directory.vocabulary, context, directory.end_tokens, self._depth
        )
        self._drafts = Drafts(settings, target) if self._asks else None
        self._worth = worth or Worth()
        self._step = 0
        self._mistakes = 0

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: the model is at the draft services."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Return candidates for each row of vLLM's batch; none for rows without sampled tokens, if none arrived in
        time, or while proposing does not pay.

        `token_ids_cpu` [rows, context] holds the texts, num_tokens_no_spec [rows] their lengths including sampled
        tokens. An exception here would end vLLM's engine with all its requests. So any error results in no proposals,
        and after MAX_MISTAKES errors proposing is turned off.
        """
        if self._drafts is not None:
            try:
                return self._candidates(self._drafts, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:
                log.exception("proposing_failed")
                self._mistakes += 1
                if self._mistakes >= MAX_MISTAKES:
                    log.error("proposing_ended", mistakes=self._mistakes)
                    self._drafts = None
        return [[] for _ in sampled_token_ids]

    def _candidates(
        self,
        drafts: Drafts,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
    ) -> list[list[int]]:
        """Return the candidates for `propose` from these drafts."""
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        self._step += 1
        rows = {
            number: token_ids_cpu[number, : num_tokens_no_spec[number]]
            for number, sampled in enumerate(sampled_token_ids)
            if sampled
        }
        if not rows:
            return proposed
        tokens, now = sum(map(len, sampled_token_ids)), time.monotonic()
        with drafts.lock:
            texts = self._texts.find(rows, self._step)
            new = {number: text.extend_to(rows[number]) for number, text in texts.items()}  # nothing for a new text
            proposing = self._worth.after_step(len(rows), tokens, now, continues=any(new.values()))
            for number, text in texts.items():
                drafts.follow(text, new[number], proposing=proposing)
            if proposing:
                drafts.wait(texts.values())
                for number, text in texts.items():
                    proposed[number] = text.chain(self._depth)
            drafts.forget(self._texts.forget(self._step - REMEMBERED_STEPS))
        return proposed


def _local(model: str, revision: str | None) -> Path:
    """Return the directory of a model that vLLM has loaded, by its path or hub name."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # installed with vLLM

    return Path(snapshot_download(model, revision=revision, local_files_only=True))
