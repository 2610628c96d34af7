"""A proposer for vLLM (`method` "custom_class" of its speculative configuration): candidates come from draft services.

vLLM asks it after each step, and verifies what it returns with the next one. Drafts work while the target computes, so
candidates are mostly there when they are asked for; a step waits for them no longer than it is told to. What drafts do
costs speed at most: vLLM accepts what its own rejection sampler accepts. Where proposals make texts slower, as is
measured all the time (`worth.py`), none are made.

A proposer of this kind returns tokens and no probabilities. With temperature 0 a candidate is accepted if it is the
target's choice; with sampling, with the probability that the target gives it: so drafts send their likeliest tokens.
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
from specdec.vllm.settings import Settings
from specdec.vllm.texts import TextTable
from specdec.vllm.worth import Worth

log = structlog.get_logger()

MOST_MISTAKES = 8
"""Steps in which proposing may fail by a mistake of ours: then nothing is proposed any more."""

REMEMBERED_STEPS = 64
"""Steps after which a text that is not in the batch any more is over."""


class RemoteDraft:
    """Drafts of vLLM's texts, at services. One thread of vLLM's worker uses it."""

    def __init__(self, vllm_config: Any, worth: Worth | None = None) -> None:
        """`vllm_config` is vLLM's, `worth` decides when to propose. ValueError if the environment does not say where
        drafts are (`settings.py`)."""
        settings = Settings.of()
        model = vllm_config.model_config
        self._depth: int = vllm_config.speculative_config.num_speculative_tokens
        # Only one part of the model is listened to, so only that one asks.
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
        """Do nothing: the model is elsewhere."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """Return candidates for each row of vLLM's batch: none where nothing was sampled, or nothing came in time.

        `token_ids_cpu` [rows, context] holds the texts, of num_tokens_no_spec [rows] tokens each, what was sampled
        included. An exception here would end vLLM's engine with all its requests: whatever goes wrong, nothing is
        proposed, and after some times nothing any more."""
        if self._drafts is not None:
            try:
                return self._candidates(self._drafts, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:
                log.exception("proposing_failed")
                self._mistakes += 1
                if self._mistakes >= MOST_MISTAKES:
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
        """Return what `propose` does, of these drafts."""
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        self._step += 1
        rows = {
            number: token_ids_cpu[number, : num_tokens_no_spec[number]]
            for number, sampled in enumerate(sampled_token_ids)
            if sampled
        }
        if not rows:
            return proposed
        proposing = self._worth.after_step(len(rows), sum(map(len, sampled_token_ids)), time.monotonic())
        with drafts.lock:
            texts = self._texts.find(rows, self._step)
            for number, text in texts.items():
                drafts.follow(text, text.extend_to(rows[number]), proposing=proposing)
            if proposing:
                drafts.wait(texts.values())
                for number, text in texts.items():
                    proposed[number] = text.chain(self._depth)
        drafts.forget(self._texts.forget(self._step - REMEMBERED_STEPS))
        return proposed


def _local(model: str, revision: str | None) -> Path:
    """Return the directory of a model that vLLM has loaded, by its path or by its name on a hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # vLLM brings it

    return Path(snapshot_download(model, revision=revision, local_files_only=True))
