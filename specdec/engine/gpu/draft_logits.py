"""A draft's logits on the GPU. The host fetches all shortlists in one copy, and whole rows only on request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decoding.draft_logits import MAX_DRAFT_LOGITS, Shortlists
from specdec.decoding.processing import Logits
from specdec.engine.gpu.staging import upload


class GpuDraftLogits:
    """The wanted rows of a pass as float32 logits [n, V] on the GPU. The constructor fetches their shortlists."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._fetched: dict[int, Logits] = {}  # whole rows by index
        values, ids = logits.topk(min(MAX_DRAFT_LOGITS, logits.shape[1]))
        ids, order = ids.sort(dim=1)  # equal logits: lower ids first
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        fetched = torch.stack([values.view(torch.int32), ids.gather(1, order).int()]).cpu().numpy()
        self._shortlists = Shortlists(fetched[0].view(np.float32), fetched[1].astype(np.int64))

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        return self._shortlists.of(rows)

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        if missing := [row for row in dict.fromkeys(rows) if row not in self._fetched]:
            wanted = upload(np.asarray(missing), self._logits.device)
            fetched = self._logits.index_select(0, wanted).cpu().numpy()
            self._fetched.update(zip(missing, fetched, strict=True))
        return [self._fetched[row] for row in rows]
