"""Working memory of an engine, besides its weights and KV cache: on a CPU, memory for logits and start-up checks; in an
exported model, memory for attention.

The preflight counts it (`preflight/memory_needed.py`), and the KV cache leaves room for it (`memory.py`).
"""

from __future__ import annotations

from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts

MAX_SESSIONS = 512
"""Default limit on the sessions of a step (`--max-sessions`)."""

MAX_STEP_CANDIDATES = 256
"""Limit on a step's candidates in all sessions together (each has a row of logits), and on its rows that score prompts.
Start-up measures steps of this size; the step loop reserves as many tree slots, except for chain-only engines."""

MAX_SLICE_IDS = 1 << 14
"""Token ids per slice of an output head (`hf/linear.py`: `SlicedHead`). For 512 rows a slice has 32 MiB of logits. With
half as many ids per slice, the call overhead of a head of 262,144 ids would be noticeable beside its products."""

ATTENTION_BYTES = 1 << 28
"""Limit on an exported model's keys, values and scores in one layer, for all lanes that are padded to one shape. Beyond
it, a pass runs in several parts, and each reads all weights. A chunk of 512 rows of a prompt reaches it at about
8,000 tokens with 14 heads."""

ATTENTION_COPIES = 2
"""Copies of keys, values and scores at a time: keys and values in two orders, scores before and after softmax."""

CHUNK_LANES, LANE_ROWS = 8, 64
"""Lanes in a long text's chunk of 512 rows, and rows in each lane."""

LAID_OUT_AT_ONCE = 4
"""Copies of a layer while it is laid out: two to be joined, the joined one, and the prepacked one."""

COMPARED_AT_ONCE = 3
"""Copies of a product's result while row counts are compared."""

NUMBER = 4
"""Bytes of a float32 number."""


def row_bytes(vocabulary: int) -> int:
    """Return the bytes of one row of logits."""
    return vocabulary * NUMBER


def logits_bytes(vocabulary: int, sessions: int = 0) -> int:
    """Return the bytes of the logits of a step with the most candidates, plus one row per session."""
    return InvariantRowCounts(CANDIDATES).padded(MAX_STEP_CANDIDATES + sessions) * row_bytes(vocabulary)


def attention_bytes(longest: int, key_bytes: int, pair_bytes: int) -> int:
    """Return the bytes of attention in an exported model's largest pass, with texts of up to `longest` tokens.
    `key_bytes`, `pair_bytes`: as in `GroupMemory` (`padded/layout.py`)."""
    chunk = CHUNK_LANES * longest * (key_bytes + LANE_ROWS * pair_bytes)
    return ATTENTION_COPIES * min(ATTENTION_BYTES, chunk)


def start_bytes(vocabulary: int, hidden: int, layer: int, outputs: int) -> int:
    """Return the working memory, in bytes, for laying out layers and comparing row counts. `layer`: bytes of the
    largest layer; `outputs`: upper bound on the outputs of a layer; `hidden`: inputs of an output head."""
    ids = min(vocabulary, MAX_SLICE_IDS)
    laid_out = LAID_OUT_AT_ONCE * max(layer, ids * hidden * NUMBER)
    compared: int = COMPARED_AT_ONCE * CANDIDATES[-1] * max(outputs, ids) * NUMBER
    return laid_out + compared
