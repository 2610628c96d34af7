"""LearningService: gives the kept texts to a trainer, and forgets tenants, for callers with the key.

Forgetting a tenant has three steps: record it, in memory and in the folder of versions; delete its kept texts; roll
back the versions that have learned from it. The record also covers texts and versions that arrive meanwhile.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
import weakref
from typing import NamedTuple

import grpc
import structlog

from draft_service.draft_loop import DraftLoop
from draft_service.forgotten import Forgotten
from draft_service.traffic import KeptText
from draft_service.versions import VersionedDrafter
from specdec.api_keys import bearer_key, hash_of
from specdec.engine.learned_from import LearnedFrom, tenant_digest
from specdec.serving.errors import InvalidRequestError, NotRememberedError, UnauthenticatedError
from specdec.serving.interceptor import Gate, Metadata
from specdec.serving.target_logprobs import MAX_TOP
from specdec.serving.validation import MAX_TENANT_CHARACTERS
from specdec.v2 import learning_pb2, learning_pb2_grpc

log = structlog.get_logger()

MIN_KEY_CHARACTERS = 16

TOKENS_A_MESSAGE = 1 << 16
"""A message gets no further text once it has this many tokens, counting MAX_TOP for each place with
log-probabilities."""


class Learning(NamedTuple):
    """The key of LearningService, and the tenants that were forgotten or learned from."""

    key: str  # that callers must present
    forgotten: Forgotten  # their texts are not kept, and versions that learned from these are not served
    learned_from: LearnedFrom | None = None  # tenants that the service's first model has learned from


class LearningServicer(learning_pb2_grpc.LearningServiceServicer):
    """Serves the texts kept by one draft loop, and forgets tenants there and in its drafter's versions."""

    name = "specdec.v2.LearningService"
    tokens_a_message = TOKENS_A_MESSAGE

    def __init__(self, loop: DraftLoop, learning: Learning) -> None:
        """`loop` keeps texts, tries versions, or both."""
        self._loop = loop
        self._learning = learning
        self._forgetting: set[asyncio.Task[learning_pb2.ForgetResponse]] = set()

    def register(self, server: grpc.aio.Server) -> None:
        learning_pb2_grpc.add_LearningServiceServicer_to_server(self, server)

    async def GetTraffic(  # type: ignore[override]
        self,
        request: learning_pb2.GetTrafficRequest,
        context: grpc.aio.ServicerContext[learning_pb2.GetTrafficRequest, learning_pb2.GetTrafficResponse],
    ) -> None:
        now = time.monotonic()
        message, tokens = learning_pb2.GetTrafficResponse(), 0
        texts = [] if self._loop.traffic is None else self._loop.traffic.texts()
        # Weak references: a text that is forgotten or evicted before its turn is freed, and not sent.
        kept = [weakref.ref(text) for text in texts]
        texts.clear()
        for reference in kept:
            tokens += _add(message, reference(), now)
            if tokens >= self.tokens_a_message:
                await context.write(message)
                message, tokens = learning_pb2.GetTrafficResponse(), 0
        if message.texts:
            await context.write(message)

    async def Forget(
        self,
        request: learning_pb2.ForgetRequest,
        context: grpc.aio.ServicerContext[learning_pb2.ForgetRequest, learning_pb2.ForgetResponse],
    ) -> learning_pb2.ForgetResponse:
        if len(request.tenant) > MAX_TENANT_CHARACTERS:
            problem = f"has {len(request.tenant)} characters, must have at most {MAX_TENANT_CHARACTERS}"
            raise InvalidRequestError([("tenant", problem)])
        # Forgetting completes even if the caller's deadline passes first.
        forgetting = asyncio.create_task(self._forget(request.tenant))
        self._forgetting.add(forgetting)
        forgetting.add_done_callback(self._forgetting.discard)
        return await asyncio.shield(forgetting)

    async def _forget(self, tenant: str) -> learning_pb2.ForgetResponse:
        not_written: NotRememberedError | None = None
        try:
            await asyncio.to_thread(self._learning.forgotten.add, tenant)  # waits for the disk
        except NotRememberedError as error:  # raised below, after the steps that work without the folder
            not_written = error
        forgotten = learning_pb2.ForgetResponse()
        if self._loop.traffic is not None:
            forgotten.texts, forgotten.tokens = self._loop.traffic.forget(tenant)
        if isinstance(drafter := self._loop.drafter, VersionedDrafter):
            forgotten.versions.extend(await self._loop.call(drafter.forget))
        if (learned := self._learning.learned_from) is not None:
            forgotten.first_learned = learned.has(tenant_digest(tenant), math.inf)
        log.info(
            "tenant_forgotten",
            tenant_digest=tenant_digest(tenant),
            texts=forgotten.texts,
            tokens=forgotten.tokens,
            versions=list(forgotten.versions),
        )
        if not_written is not None:
            log.error("tenant_not_remembered", why=str(not_written))
            raise not_written
        return forgotten


def key_gate(key: str) -> Gate:
    """Return the gate that refuses calls of LearningService without this key (UnauthenticatedError)."""
    expected = hash_of(key)

    def check(method: str, metadata: Metadata) -> None:
        if not method.startswith(f"/{LearningServicer.name}/"):
            return
        given = [value for name, value in metadata if name == "authorization"]
        presented = bearer_key(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
        if presented is None or not hmac.compare_digest(hash_of(presented), expected):
            raise UnauthenticatedError("the key of --learn-key-file is missing or wrong")

    return check


def _add(message: learning_pb2.GetTrafficResponse, text: KeptText | None, now: float) -> int:
    """Add a text, unless it is gone, and return its number of tokens, counted as in TOKENS_A_MESSAGE."""
    if text is None:
        return 0
    message.texts.add(
        tenant_digest=tenant_digest(text.tenant),
        tokens=text.tokens.tolist(),
        prompt_tokens=text.prompt,
        overruled=text.overruled.tolist(),
        age_us=int(1e6 * max(0.0, now - text.kept_at)),
        logprobs=text.places.messages,
    )
    return len(text.tokens) + MAX_TOP * len(text.places)
