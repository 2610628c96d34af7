"""Flow control of candidates: a token bucket, filled by commits, limits a draft's messages.

A draft sends candidates a few times a step, and stops at the number its verifier has granted. A draft without end would
keep the verifier from its steps and the orchestrator from its other streams.
"""

from __future__ import annotations

from specdec.serving.mux.stream import MAX_BYTES
from specdec.serving.validation import MAX_NODES_A_MESSAGE
from specdec.v2 import model_pb2

MESSAGES_A_COMMIT = 16
"""Messages added to the bucket by each commit: four times the number asked of a draft. One more is added for every four
candidates the draft may have, since distributions of the whole vocabulary (CONTRASTIVE) are sent without waiting for
each other."""


MAX_EXTEND_BYTES = MAX_BYTES - 64
"""Largest message in bytes. It goes to the verifier inside another, slightly longer message."""

NODES_FOR_ONE = 64
BYTES_FOR_ONE = 1 << 20
"""A message costs 1, plus 1 for every 64 candidates (ancestors included) and 1 for every MiB. The one with the most
candidates (`MAX_NODES_A_MESSAGE`) costs 17, and so does the longest. No distribution of ours has as many bytes."""


class CandidateFlow:
    """The number of messages the draft of one session may still send. `max_nodes`: limit on its live candidates. In the
    worst case it sends each in a message of its own, and each again with its distribution."""

    def __init__(self, max_nodes: int) -> None:
        self._refill = MESSAGES_A_COMMIT + max_nodes // 4
        self._most = 2 * max_nodes + self._refill
        self._left = self._most

    def committed(self) -> None:
        """Refill the bucket: the text has grown, so there are new candidates to send."""
        self._left = min(self._most, self._left + self._refill)

    def violation(self, extend: model_pb2.Extend) -> str:
        """Count a message; return what is wrong with it, empty if nothing is."""
        # There is one distribution more than candidates: the committed prefix's.
        nodes, size = max(len(extend.tokens), len(extend.parents), len(extend.distributions) - 1), extend.ByteSize()
        self._left -= 1 + nodes // NODES_FOR_ONE + size // BYTES_FOR_ONE
        if self._left < 0:
            return f"it sends too many messages, must send at most {self._most} at once and {self._refill} per commit"
        if nodes > MAX_NODES_A_MESSAGE:
            return f"it sends {nodes} candidates in a message, at most {MAX_NODES_A_MESSAGE} are allowed"
        if size > MAX_EXTEND_BYTES:
            return f"it sends a message of {size} bytes, at most {MAX_EXTEND_BYTES} are allowed"
        return ""
