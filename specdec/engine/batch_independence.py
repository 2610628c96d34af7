"""The exactness check of a whole engine: whether a text's logits depend on its batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, chains_only, cpu_threads
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, Slots

OTHER_TEXTS = (41, 200, 487, 680)
"""Numbers of other rows beside a text: below, near and above the largest of row_counts.CANDIDATES."""

DECODES = (2, 6, 40)
"""Numbers of other texts with one row each, beside one row of the text. A GPU engine may have separate graphs for such
decode steps, padded to several sizes."""

TEXT = 24
"""Tokens in the check's text."""

AT_ONCE = 5
"""Number of tokens at the text's end that are computed again as candidates."""

LONG_TEXT = 1024
"""Tokens of a long text, if it fits. Attention over short texts is never split."""

CHUNK = 256
"""Tokens per prefill chunk of a long text."""


class Places(NamedTuple):
    """Slots of the check's texts."""

    own: Slots
    other_slots: Slots
    candidates: Slots  # for the end of the text when it is computed as candidates


def rows_are_independent(engine: Engine, most_texts: int | None = None) -> bool:
    """Return whether a text gives the same logits, bit for bit, in all kinds of batch and with every thread count.

    The text is computed as one prompt; token by token beside other texts; with its end as candidates (in other slots,
    if the engine supports side branches); and beside many other rows, in a batch of up to `most_texts` texts. The check
    covers attention and all layers. It uses the first slots of the KV cache.
    """
    other_texts = OTHER_TEXTS if most_texts is None else [min(others, most_texts - 1) for others in OTHER_TEXTS]
    found = set()
    for _ in _thread_counts(engine):
        logits = _logits_in_any_batch(engine, other_texts)
        if logits is None:
            return False
        found.add(logits.tobytes())
    return len(found) == 1


def long_rows_are_independent(engine: Engine, context: int) -> bool:
    """Return whether the end of a long text (of at most `context` tokens) gives the same logits, bit for bit, as a
    prompt chunk, row by row, beside the end of another such text, and beside rows of short texts. Both texts leave the
    first block unused."""
    length = min(LONG_TEXT, context, engine.capacity // 2 - BLOCK)
    texts = np.random.default_rng(3).integers(0, engine.vocabulary, (2, length)).tolist()
    room = -(-length // BLOCK) * BLOCK
    places = [BLOCK + number * room + np.arange(length) for number in range(2)]
    end = length - AT_ONCE

    def logits(*parts: tuple[int, int, int]) -> NDArray[np.float32]:
        """Return the logits at the end of each part, given as (text number, first row, end row)."""
        packer = engine.packer()
        for number, first, stop in parts:
            rows = packer.add_rows(texts[number][first:stop], first, places[number][first:stop])
            packer.add_path(places[number][:stop], list(rows))
            for row in rows[-AT_ONCE:]:
                packer.want(row)
        return engine.forward(packer.pack()).copy()

    for number in range(2):
        for first in range(0, end, CHUNK):
            logits((number, first, min(first + CHUNK, end)))
    together = logits((0, end, length))
    beside = logits((0, end, length), (1, end, length))[:AT_ONCE]
    alone = np.concatenate([logits((0, place, place + 1))[:1] for place in range(end, length)])
    crowd = np.concatenate([logits((0, place, place + 1), (1, end, end + 1))[:1] for place in range(end, length)])
    if not all(np.array_equal(together[:AT_ONCE], other) for other in (beside, alone, crowd)):
        return False
    return _is_the_same_in_decodes(engine, texts[0][-1], places[0], together[AT_ONCE - 1])


def bits_of_prompt(engine: Engine) -> str:
    """Return a digest of the logits of the check's text as one prompt, with every thread count. Only for engines that
    accept any slots."""
    digest = hashlib.sha256()
    for _ in _thread_counts(engine):
        packer, own = engine.packer(), np.arange(1, 1 + TEXT)
        _add_text(packer, _text(engine), 0, own)
        digest.update(engine.forward(packer.pack())[:TEXT].tobytes())
    return digest.hexdigest()


def _text(engine: Engine) -> list[int]:
    """Return the check's text of TEXT tokens."""
    return list(np.random.default_rng(1).integers(0, engine.vocabulary, TEXT).tolist())


def _places(engine: Engine) -> Places:
    """Return the slots of the texts. With an engine limited to chains, each text has its own blocks, and the candidates
    use the slots of the text's end."""
    if chains_only(engine):
        own, other_slots = (BLOCK * block + np.arange(TEXT) for block in (1, 2))
        return Places(own, other_slots, own[-AT_ONCE:])
    return Places(*np.split(np.arange(1, 1 + 4 * TEXT + AT_ONCE), (TEXT, 4 * TEXT)))


def _thread_counts(engine: Engine) -> Iterator[None]:
    """Switch an engine to each of its thread counts in turn, the largest last; yield once if it has no choice."""
    threaded = cpu_threads(engine)
    if threaded is None:
        yield
        return
    for count in reversed(threaded.threads):
        threaded.use_threads(count)
        yield


def _logits_in_any_batch(engine: Engine, other_texts: Sequence[int]) -> NDArray[np.float32] | None:
    """Return the logits of a text; None unless they are equal in all tested batches."""
    text = _text(engine)
    other_tokens = np.random.default_rng(2).integers(0, engine.vocabulary, 3 * TEXT).tolist()
    own, other_slots, candidates = _places(engine)

    def logits(packer: Packer, wanted: int) -> NDArray[np.float32]:
        return engine.forward(packer.pack())[:wanted].copy()

    packer = engine.packer()
    _add_text(packer, text, 0, own)
    whole = logits(packer, TEXT)

    for position, token in enumerate(text[:-AT_ONCE]):
        packer = engine.packer()
        others = position % 4
        if others:
            rows = packer.add_rows(other_tokens[: 5 * others], 0, other_slots[: 5 * others])
            packer.add_path(other_slots[: 5 * others], rows)
        row = packer.add_row(token, position, int(own[position]))
        packer.add_path(own[: position + 1], [row])
        packer.want(row)
        if not np.array_equal(logits(packer, 1)[0], whole[position]):
            return None

    packer = engine.packer()
    start = TEXT - AT_ONCE
    _add_text(packer, text[start:], start, np.concatenate([own[:start], candidates]))
    if not np.array_equal(logits(packer, AT_ONCE), whole[start:]):
        return None

    for others in other_texts:  # enough rows for torch to split a tensor among threads, at various places
        packer = engine.packer()
        for _ in range(others):
            _add_other(packer, other_tokens[0])
        _add_text(packer, text, 0, own)
        if not np.array_equal(logits(packer, TEXT), whole):
            return None
    return whole if _is_the_same_in_decodes(engine, text[-1], own, whole[-1]) else None


def _is_the_same_in_decodes(engine: Engine, token: int, keys: Slots, logits: NDArray[np.float32]) -> bool:
    """Return whether the last token of a text with these keys has these logits in decode steps (one row per text)."""
    for others in DECODES:
        packer = engine.packer()
        for _ in range(others):
            _add_other(packer, token)
        row = packer.add_row(token, len(keys) - 1, int(keys[-1]))
        packer.add_path(keys, [row])
        packer.want(row)
        if not np.array_equal(engine.forward(packer.pack())[0], logits):
            return False
    return True


def _add_text(packer: Packer, tokens: Sequence[int], start: int, keys: Slots) -> None:
    """Add the tokens of a text from position `start` on, and want their logits. `keys`: the slots of the whole text."""
    rows = packer.add_rows(tokens, start, keys[start:])
    packer.add_path(keys, rows)
    for row in rows:
        packer.want(row)


def _add_other(packer: Packer, token: int) -> None:
    """Add a text of one token; it needs no KV memory."""
    packer.add_path(np.asarray([PADDING_SLOT]), [packer.add_row(token, 0, PADDING_SLOT)])
