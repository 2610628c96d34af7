"""Generation defaults: sampling parameters from the model's generation_config.json, for requests that set none."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Self

import numpy as np

from specdec.decoding.sampling import NUMBERS, Sampling, sampling_violations
from specdec.engine.model_directory import MAX_CONTEXT, MAX_VOCABULARY, ModelDirectory
from specdec.engine.model_file import Fields, ModelDirectoryError

FIELDS = tuple(name for name in NUMBERS if name not in ("frequency_penalty", "presence_penalty"))
"""Sampling parameters read from the file: all that transformers knows. `ModelDirectory` reads the file's
`eos_token_id`."""

NOT_TAKEN: dict[str, object] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
}
"""transformers' fields that would change tokens and are not supported here, with their neutral values."""


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults of one model. Without a file, or for a request that ignores it, they are neutral: greedy decoding,
    everything else off."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    """Maximum tokens of a text; None: up to the context limit."""
    not_taken: tuple[str, ...] = ()
    """Fields of the file that request unsupported features. They have no effect, and are reported at start-up."""
    greedy: bool = False
    """True if the file itself sets greedy decoding. Then `fallback_temperature` of a request has no effect."""

    @classmethod
    def of(cls, directory: ModelDirectory) -> Self:
        """Read a model's defaults; ModelDirectoryError, naming file and field, for a value that no request could
        set."""
        file = directory.generation_config
        found = {name: _number(file, name) for name in FIELDS if file.has(name)}
        if file.has("top_k"):
            found["top_k"] = file.integer("top_k", 0, MAX_VOCABULARY)
        sampled = file.flag("do_sample", default=False)
        sampling = Sampling(**{"temperature": 1.0, **found})  # type: ignore[arg-type]
        for name, problem in sampling_violations(sampling, directory.vocabulary, frozenset()):
            raise ModelDirectoryError(f"{file.file}: {name.removeprefix('sampling.')} {problem}")
        if not sampled:
            sampling = replace(sampling, temperature=0.0)
        most = file.integer("max_new_tokens", 1, MAX_CONTEXT) if file.has("max_new_tokens") else None
        not_taken = tuple(
            name for name, neutral in NOT_TAKEN.items() if file.has(name) and file.content[name] != neutral
        )
        greedy = (file.has("do_sample") and not sampled) or found.get("temperature") == 0.0
        return cls(sampling, most, not_taken, greedy)

    def for_contrast(self) -> Self:
        """Return the defaults valid under the CONTRASTIVE rule, which does not sample."""
        return replace(self, sampling=Sampling(repetition_penalty=self.sampling.repetition_penalty))

    @property
    def used(self) -> dict[str, float]:
        """The file's non-neutral values by name, with the fewest digits that identify a float32; and temperature 0 if
        the file sets greedy decoding."""
        neutral = asdict(Sampling())
        sampling = {name: getattr(self.sampling, name) for name in FIELDS}
        used = {name: float(str(np.float32(v))) for name, v in sampling.items() if v != neutral[name]}
        used |= {"temperature": 0.0} if self.greedy else {}
        return used if self.max_new_tokens is None else {**used, "max_new_tokens": self.max_new_tokens}


NEUTRAL = GenerationDefaults()


def _number(file: Fields, name: str) -> float:
    """Read a number with the precision of the wire: a resumed text carries the value and must continue with it."""
    return float(np.float32(file.number(name)))
