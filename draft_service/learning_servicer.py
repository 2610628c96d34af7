"""LearningService: gives the kept texts to a trainer, and forgets tenants, for callers with the key."""

from __future__ import annotations

import hashlib
import hmac
import time

import grpc
import structlog

from draft_service.traffic import KeptText, Traffic
from specdec.serving.errors import InvalidRequestError, UnauthenticatedError
from specdec.serving.interceptor import Gate, Metadata
from specdec.serving.validation import MAX_TENANT_CHARACTERS
from specdec.v2 import learning_pb2, learning_pb2_grpc

log = structlog.get_logger()

MIN_KEY_CHARACTERS = 16

TOKENS_A_MESSAGE = 1 << 16
"""Tokens after which a message of texts is full."""


class LearningServicer(learning_pb2_grpc.LearningServiceServicer):
    """Serves the traffic of one draft service."""

    name = "specdec.v2.LearningService"

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def register(self, server: grpc.aio.Server) -> None:
        learning_pb2_grpc.add_LearningServiceServicer_to_server(self, server)

    async def GetTraffic(  # type: ignore[override]
        self,
        request: learning_pb2.GetTrafficRequest,
        context: grpc.aio.ServicerContext[learning_pb2.GetTrafficRequest, learning_pb2.GetTrafficResponse],
    ) -> None:
        now = time.monotonic()
        message, tokens = learning_pb2.GetTrafficResponse(), 0
        for text in self._traffic.texts():
            message.texts.append(_message(text, now))
            tokens += len(text.tokens)
            if tokens >= TOKENS_A_MESSAGE:
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
        texts, tokens = self._traffic.forget(request.tenant)
        log.info("tenant_forgotten", tenant_digest=digest(request.tenant), texts=texts, tokens=tokens)
        return learning_pb2.ForgetResponse(texts=texts, tokens=tokens)


def key_gate(key: str) -> Gate:
    """Return the gate that refuses calls of LearningService without this key (UnauthenticatedError)."""
    expected = f"Bearer {key}".encode()

    def check(method: str, metadata: Metadata) -> None:
        if not method.startswith(f"/{LearningServicer.name}/"):
            return
        given = next((value for name, value in metadata if name == "authorization"), "")
        presented = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(hashlib.sha256(presented).digest(), hashlib.sha256(expected).digest()):
            raise UnauthenticatedError("the key of --learn-key-file is missing or wrong")

    return check


def digest(tenant: str) -> str:
    """Return the digest that stands for a tenant outside of the draft service."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def _message(text: KeptText, now: float) -> learning_pb2.KeptText:
    return learning_pb2.KeptText(
        tenant_digest=digest(text.tenant),
        tokens=text.tokens.tolist(),
        prompt_tokens=text.prompt,
        overruled=text.overruled.tolist(),
        age_us=int(1e6 * max(0.0, now - text.kept_at)),
    )
