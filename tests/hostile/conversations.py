"""A correct client's messages for each method: the requests of one call, in order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from specdec.v2 import draft_pb2, generation_pb2, model_pb2, mux_pb2, trace_pb2, verifier_pb2
from tests.models import VOCABULARY

VERIFY = "/specdec.v2.VerifierService/Verify"
DRAFT = "/specdec.v2.DraftService/Draft"

Conversation = Callable[[random.Random], Sequence[Message]]


def tokens(generator: random.Random, most: int = 12) -> list[int]:
    return [generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(1, most))]


def sampling(generator: random.Random) -> model_pb2.Sampling:
    return model_pb2.Sampling(
        repetition_penalty=generator.choice((1.0, 1.3)),
        temperature=generator.choice((0.0, 0.8)),
        top_k=generator.choice((0, 40)),
        top_p=1.0,
        seed=generator.getrandbits(64),
        logit_bias={generator.randrange(VOCABULARY): 2.5},
    )


def extend(generator: random.Random, base: int) -> model_pb2.Extend:
    """Return a chain of candidates."""
    chain = tokens(generator, 6)
    return model_pb2.Extend(base=base, tokens=chain, parents=range(len(chain)), logprob_bytes=bytes(len(chain)))


def verify(generator: random.Random) -> list[Message]:
    prompt = tokens(generator)
    opened = verifier_pb2.VerifyOpen(
        prompt_tokens=prompt,
        sampling=sampling(generator),
        rule=generator.choice((0, 1, 2)),  # type: ignore[arg-type]
        max_tokens=generator.randrange(1, 24),
        end_tokens=[2],
        top_logprobs=generator.choice((None, None, 2)),
        policy=verifier_pb2.VerifyPolicy(
            drafters=generator.sample(list(model_pb2.Drafter.values())[1:], 3), patience_us=1000
        ),
        attempt=1,
    )
    said = [verifier_pb2.VerifyRequest(open=opened)]
    for step in range(generator.randrange(5)):
        said.append(verifier_pb2.VerifyRequest(extend=extend(generator, len(prompt) + step)))
        said.append(verifier_pb2.VerifyRequest(consumed=verifier_pb2.Consumed(tokens=step)))
    said.append(verifier_pb2.VerifyRequest(policy=opened.policy))
    return list(said)


def draft(generator: random.Random) -> list[Message]:
    prompt = tokens(generator)
    opened = draft_pb2.DraftOpen(
        prompt_tokens=prompt,
        sampling=sampling(generator),
        rule=generator.choice((0, 1, 2)),  # type: ignore[arg-type]
        max_tokens=generator.randrange(1, 24),
        end_tokens=[2],
        policy=draft_pb2.DraftPolicy(max_nodes=32, max_depth=8),
        vocabulary_size=VOCABULARY,
    )
    said = [draft_pb2.DraftRequest(open=opened)]
    for step in range(generator.randrange(5)):
        news = model_pb2.Committed(base=len(prompt) + step, tokens=[generator.randrange(3, VOCABULARY)])
        said.append(draft_pb2.DraftRequest(committed=news))
    said.append(draft_pb2.DraftRequest(policy=opened.policy))
    said.append(draft_pb2.DraftRequest(resend=draft_pb2.Resend()))
    return list(said)


def generate_request(generator: random.Random) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(
        max_tokens=generator.randrange(1, 24),
        sampling=generation_pb2.SamplingParameters(temperature=generator.choice((0.0, 0.8)), seed=7),
        stop=generator.choice(((), ("qz",))),
        n=generator.choice((1, 1, 1, 2)),
        rule=generator.choice((0, 1, 2)),  # type: ignore[arg-type]
        tenant=generator.choice(("", "a")),
        speculation=generator.choice(
            (
                generation_pb2.Speculation(),
                generation_pb2.Speculation(off=True),
                generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_REMOTE], forced=True),
                generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_NGRAM]),
            )
        ),
    )
    match generator.randrange(3):
        case 0:
            request.text = "once upon a time"
        case 1:
            request.tokens.ids.extend(tokens(generator))
        case _:
            request.chat.messages.add(role="user", content="hello")
    if generator.random() < 0.3:
        request.logprobs = 2
    return request


def generate(generator: random.Random) -> list[Message]:
    return [generate_request(generator)]


def complete(generator: random.Random) -> list[Message]:
    return [generation_pb2.CompleteRequest(request=generate_request(generator))]


def list_models(_: random.Random) -> list[Message]:
    return [generation_pb2.ListModelsRequest()]


def tokenize(generator: random.Random) -> list[Message]:
    return [
        generation_pb2.TokenizeRequest(text="def " * generator.randrange(99), pieces=bool(generator.randrange(2))),
    ]


def get_stats(_: random.Random) -> list[Message]:
    """For any service, since all these requests are empty."""
    return [verifier_pb2.GetStatsRequest()]


def carry_of(method: str, inner: Conversation) -> Conversation:
    """Return the same conversation as a stream of the multiplexer, or occasionally as several, in a few batches."""

    def carry(generator: random.Random) -> list[Message]:
        batches = []
        for number in range(1, 1 + generator.choice((1, 1, 3))):
            frames = [mux_pb2.Frame(stream=number, begin=mux_pb2.Begin(method=method, timeout_us=2_000_000))]
            frames += [
                mux_pb2.Frame(stream=number, message=message.SerializeToString()) for message in inner(generator)
            ]
            frames += [mux_pb2.Frame(stream=number, end=mux_pb2.End())] * (generator.random() < 0.5)
            cut = generator.randrange(len(frames))
            batches += [mux_pb2.ConnectRequest(frames=part) for part in (frames[:cut], frames[cut:])]
        return list(batches)

    return carry


def find_prefix(generator: random.Random) -> list[Message]:
    hashes = [generator.getrandbits(64) for _ in range(generator.choice((0, 1, 40)))]
    return [verifier_pb2.FindPrefixRequest(block_hashes=hashes)]


def get_trace(generator: random.Random) -> list[Message]:
    return [trace_pb2.GetTraceRequest(request_id=generator.choice(("", "unknown", "0" * 16, "r" * 4000)))]


def health(generator: random.Random) -> list[Message]:
    return [health_pb2.HealthCheckRequest(service=generator.choice(("", "specdec.v2.VerifierService", "nobody")))]


def reflect(generator: random.Random) -> list[Message]:
    requests = (
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="specdec.v2.VerifierService"),
        reflection_pb2.ServerReflectionRequest(file_by_filename="specdec/v2/model.proto"),
        reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="specdec.v2.Extend"),
    )
    return [generator.choice(requests) for _ in range(generator.randrange(1, 4))]


@dataclass(frozen=True)
class Method:
    """One method behind the ports of one role."""

    role: str
    path: str
    conversation: Conversation
    weight: int = 1  # relative call frequency

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2] or "(none)"


ENCRYPTED_ROLES = ("verifier", "draft", "orchestrator")
"""Roles whose ports are encrypted if any are. Each pod also has a port for health checks, and an HTTP port for
metrics."""

_OF_ALL = (
    ("/grpc.health.v1.Health/Check", health),
    ("/grpc.health.v1.Health/Watch", health),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", reflect),
    ("/specdec.v2.TraceService/GetTrace", get_trace),
    ("/specdec.v2.VerifierService/Nothing", get_stats),
    ("/", list_models),
)

METHODS: tuple[Method, ...] = (
    Method("verifier", VERIFY, verify, weight=12),
    Method("verifier", "/specdec.v2.VerifierService/FindPrefix", find_prefix, weight=2),
    Method("verifier", "/specdec.v2.VerifierService/GetStats", get_stats, weight=2),
    Method("verifier", "/specdec.v2.MuxService/Connect", carry_of(VERIFY, verify), weight=12),
    Method("draft", DRAFT, draft, weight=12),
    Method("draft", "/specdec.v2.DraftService/GetStats", get_stats, weight=2),
    Method("draft", "/specdec.v2.MuxService/Connect", carry_of(DRAFT, draft), weight=12),
    Method("orchestrator", "/specdec.v2.GenerationService/Generate", generate, weight=12),
    Method("orchestrator", "/specdec.v2.GenerationService/Complete", complete, weight=8),
    Method("orchestrator", "/specdec.v2.GenerationService/ListModels", list_models, weight=2),
    Method("orchestrator", "/specdec.v2.GenerationService/Tokenize", tokenize, weight=4),
    Method("orchestrator", "/specdec.v2.GenerationService/GetStats", get_stats, weight=2),
    Method("orchestrator", "/specdec.v2.MuxService/Connect", carry_of(VERIFY, verify)),
    *(Method(role, path, said) for role in (*ENCRYPTED_ROLES, "health") for path, said in _OF_ALL),
)
"""Every method behind every port, including nonexistent ones."""
