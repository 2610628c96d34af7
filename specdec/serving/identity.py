"""The identity a pod sends in every handshake, and the process information in its statistics."""

from __future__ import annotations

import os

from specdec import __version__
from specdec.engine.engine import Engine, Placed
from specdec.engine.model_directory import ModelDirectory
from specdec.v2 import model_pb2

PROTOCOL_VERSION = 2
OLDEST_PROTOCOL_VERSION = 2
"""The newest and the oldest protocol version supported here. Additions that a peer may ignore do not raise the version.
The package name contains the first of a series of compatible versions, as in specdec.v2."""


def protocol_mismatch(identity: model_pb2.ModelIdentity) -> str | None:
    """Return the problem if a pod's protocol versions do not overlap with ours; None if they do."""
    newest, oldest = identity.protocol_version, identity.oldest_protocol_version or identity.protocol_version
    if newest < OLDEST_PROTOCOL_VERSION or oldest > PROTOCOL_VERSION:
        theirs, ours = _versions(oldest, newest), _versions(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
        return f"speaks protocol {theirs}, not {ours}"
    return None


def _versions(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def identity_of(directory: ModelDirectory, engine: Engine, context: int) -> model_pb2.ModelIdentity:
    """Return the identity of a pod serving a directory; `context` is the longest text, in tokens, that fits
    the pod's memory."""
    identity = identity_for(directory, context)
    identity.model, identity.model_fingerprint = directory.name, directory.model_fingerprint
    identity.numerics_fingerprint = engine.numerics
    identity.numerics_mode = model_pb2.NUMERICS_MODE_EXACT if engine.exact else model_pb2.NUMERICS_MODE_FAST
    return identity


def identity_for(target: ModelDirectory, context: int) -> model_pb2.ModelIdentity:
    """Return an identity with the fields that a model's configuration and tokenizer decide."""
    return model_pb2.ModelIdentity(
        protocol_version=PROTOCOL_VERSION,
        oldest_protocol_version=OLDEST_PROTOCOL_VERSION,
        tokenizer_fingerprint=target.tokenizer_fingerprint,
        context_tokens=min(target.context, context),
        vocabulary_size=target.vocabulary,
    )


def pod_info(engine: Engine | None = None) -> model_pb2.PodInfo:
    """Return version and process id, and, if the engine reports them, device, dtype and threads."""
    info = model_pb2.PodInfo(version=__version__, process_id=os.getpid())
    if isinstance(engine, Placed):
        info.device, info.dtype = engine.device, engine.dtype
        info.threads.extend(engine.threads)
    return info
