"""Fields of a newer contract pass through pods that do not know them: relayed unchanged, covered by checksums."""

from __future__ import annotations

import zlib
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor

from specdec.serving import checksum
from specdec.v2 import model_pb2, verifier_pb2

NEW = "new_field"


def newer(name: str) -> Any:
    """Return a message of a contract where every message has one more field, with the next number (as `buf` allows)."""
    pool = descriptor_pool.DescriptorPool()

    def add(file: FileDescriptor) -> None:
        for dependency in file.dependencies:
            add(dependency)
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        for message in proto.message_type:
            if not message.options.map_entry:
                message.field.add(
                    name=NEW,
                    number=max((field.number for field in message.field), default=0) + 1,
                    type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
                    label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
                )
        pool.Add(proto)

    add(verifier_pb2.DESCRIPTOR)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"specdec.v2.{name}"))()


def test_an_opening_of_a_newer_orchestrator_has_the_checksum_that_it_says() -> None:
    """New fields at every depth: the checksum over the re-serialized message equals the sender's."""
    opening = newer("VerifyOpen")
    opening.prompt_tokens.extend([3, 70000])
    opening.sampling.logit_bias.update({9: 1.5, 3: -2.0, 700: 0.0})
    opening.policy.lookahead.window = 5
    opening.grammar.choice.texts.append("a")
    parts = (
        opening,
        opening.sampling,
        opening.policy,
        opening.policy.lookahead,
        opening.grammar,
        opening.grammar.choice,
    )
    for number, part in enumerate(parts):
        setattr(part, NEW, f"value {number}")
    said = zlib.crc32(opening.SerializeToString(deterministic=True))
    opening.checksum = said
    heard = verifier_pb2.VerifyOpen.FromString(opening.SerializeToString())
    assert checksum.of_opening(heard) == heard.checksum == said
    assert not hasattr(heard, NEW)
    opening.grammar.choice.new_field = "another"
    assert checksum.of_opening(verifier_pb2.VerifyOpen.FromString(opening.SerializeToString())) != said


def test_the_answer_of_a_newer_verifier_has_the_checksum_that_it_says() -> None:
    opened = newer("VerifyOpened")
    opened.identity.model_fingerprint, opened.capacity.room = "f", 3
    for number, part in enumerate((opened, opened.identity, opened.capacity)):
        setattr(part, NEW, f"value {number}")
    opened.checksum = zlib.crc32(opened.SerializeToString(deterministic=True))
    heard = verifier_pb2.VerifyOpened.FromString(opened.SerializeToString())
    assert checksum.of_opening(heard) == heard.checksum
    heard.identity.model_fingerprint = "g"
    assert checksum.of_opening(heard) != heard.checksum


def test_candidates_of_a_newer_draft_are_relayed_whole() -> None:
    sent = newer("Extend")
    sent.base = 5
    sent.tokens.extend([1, 2])
    sent.distributions.add().new_field = "inside"
    sent.new_field = "outside"
    relayed = verifier_pb2.VerifyRequest(extend=model_pb2.Extend.FromString(sent.SerializeToString()))
    received = newer("VerifyRequest")
    received.ParseFromString(relayed.SerializeToString())
    assert received.extend.SerializeToString() == sent.SerializeToString()
