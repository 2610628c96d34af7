"""The options of a request, spelled once, and how they become a message.

Values are not judged here: the server knows the model and its limits. Only what the message cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict, TypeVar, Unpack

from google.protobuf.message import Message as ProtobufMessage

from specdec.v2 import generation_pb2 as pb
from specdec.v2 import model_pb2


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


class GenerateOptions(TypedDict, total=False):
    """The options of `generate` and `complete` besides the prompt. Absent and None mean the server's default."""

    tokens: Sequence[int] | None  # the prompt as token ids, instead of text
    messages: Sequence[Message] | None  # the prompt as a conversation, instead of text
    model: str  # the one to ask, where several are served

    max_tokens: int | None  # most tokens to generate; default: as many as the context holds
    min_tokens: int  # no end token before this many
    stop: str | Sequence[str]  # the text ends before the first of these strings
    stop_tokens: Iterable[int]  # token ids that end the text besides the model's own
    ignore_end_token: bool  # go on past the model's end token
    n: int  # samples; default 1
    logprobs: int | None  # log-probability of each token and of this many of the most probable ones

    temperature: float | None  # default 0: greedy
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None  # added to the logits, by token id
    banned_tokens: Iterable[int]  # token ids that are never chosen
    seed: int | None  # default: drawn by the server and sent in the first chunk

    # draft: with draft services alone; always: likewise, even where that is found not to pay; local: without them, by
    # the verifier's own proposers
    speculation: Literal["auto", "off", "always", "draft", "local"]
    drafters: Iterable[Literal["remote", "ngram", "lookahead", "local_model"]]  # instead of `speculation`: only these
    forced: bool  # with `drafters`: even where they are found not to pay
    rule: Literal["coupled", "rejection", "contrastive"]  # how candidates become tokens
    alpha: float | None  # contrastive: least probability, relative to the most probable token's; default 0.1
    amateur_temperature: float | None  # contrastive: divides the draft's logits; default 1
    max_candidates: int  # verified in one step at most; 0 is the server's default
    max_depth: int  # drafted ahead at most; 0 is the server's default
    max_branches: int  # alternatives at one place at most; 0 is the server's default
    lookahead: tuple[int, int, int]  # a window of this size, whether or not it pays: W positions, N-grams, G guesses

    tenant: str  # computed prompts are shared within a tenant only
    generated_tokens: Sequence[int]  # resumes a text that broke off; needs its seed, and n = 1
    model_fingerprint: str  # with generated_tokens: of the text's first chunk; another model is then refused


_DRAFTERS = {
    "remote": model_pb2.DRAFTER_REMOTE,
    "ngram": model_pb2.DRAFTER_NGRAM,
    "lookahead": model_pb2.DRAFTER_LOOKAHEAD,
    "local_model": model_pb2.DRAFTER_LOCAL_MODEL,
}
_SPECULATIONS = {
    "auto": pb.Speculation(),
    "off": pb.Speculation(off=True),
    "always": pb.Speculation(drafters=[model_pb2.DRAFTER_REMOTE], forced=True),
    "draft": pb.Speculation(drafters=[model_pb2.DRAFTER_REMOTE]),
    "local": pb.Speculation(
        drafters=[model_pb2.DRAFTER_NGRAM, model_pb2.DRAFTER_LOOKAHEAD, model_pb2.DRAFTER_LOCAL_MODEL]
    ),
}
Value = TypeVar("Value")

_RULES = {
    "coupled": model_pb2.ACCEPTANCE_RULE_COUPLED,
    "rejection": model_pb2.ACCEPTANCE_RULE_REJECTION,
    "contrastive": model_pb2.ACCEPTANCE_RULE_CONTRASTIVE,
}
# The options that are fields under their own names, by the message that has them.
_PLAIN = {
    "model", "max_tokens", "min_tokens", "stop_tokens", "ignore_end_token", "n", "logprobs", "generated_tokens",
    "tenant", "model_fingerprint",
}  # fmt: skip
_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "banned_tokens", "seed",
}  # fmt: skip
_CONTRAST = {"alpha", "amateur_temperature"}
_SPECULATION = {"forced", "max_candidates", "max_depth", "max_branches"}


def build_request(prompt: str | None = None, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """Return the message for a prompt and its options; ValueError or TypeError for what does not fit into one."""
    given = {name: value for name, value in {"prompt": prompt, **options}.items() if value is not None}
    prompts = given.keys() & {"prompt", "tokens", "messages"}
    if len(prompts) > 1:
        raise ValueError(f"a request has one prompt, not several: {', '.join(sorted(prompts))}")
    if "speculation" in given and "drafters" in given:
        raise ValueError("give either speculation or drafters: both say who may propose candidates")
    request = pb.GenerateRequest()
    for name, value in given.items():
        if name in _PLAIN:
            _put(request, name, name, value)
        elif name in _SAMPLING:
            _put(request.sampling, name, name, value)
        elif name in _CONTRAST:
            _put(request.contrast, name, name, value)
        elif name in _SPECULATION:
            _put(request.speculation, name, name, value)
        elif name == "prompt":
            _put(request, "text", name, value)
        elif name == "tokens":
            request.tokens.SetInParent()  # an empty prompt still says which form it has
            _put(request.tokens, "ids", name, value)
        elif name == "messages":
            request.chat.SetInParent()
            _put(request.chat, "messages", name, value)
        elif name == "stop":
            _put(request, name, name, [value] if isinstance(value, str) else value)
        elif name == "speculation":
            request.speculation.MergeFrom(_named(_SPECULATIONS, name, value))
        elif name == "drafters":
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise ValueError(f"drafters = {value!r}: not a list of names")
            found = [_named(_DRAFTERS, name, each) for each in value]
            if not found:
                raise ValueError("drafters = []: no drafters at all is speculation='off'")
            request.speculation.drafters.extend(found)
        elif name == "lookahead":
            if not isinstance(value, Sequence) or len(value) != 3:
                raise ValueError(f"lookahead = {value!r}: not (W, N, G)")
            _put(request.speculation, name, name, dict(zip(("window", "ngram", "guesses"), value, strict=True)))
        elif name == "rule":
            _put(request, name, name, _named(_RULES, name, value))
        else:
            raise TypeError(f"unknown option: {name}")
    return request


def _put(message: ProtobufMessage, field: str, option: str, value: object) -> None:
    """Set a field of any kind, and say which option it was if the value does not fit."""
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{option} = {value!r}: {error}") from error


def _named(values: Mapping[str, Value], option: str, name: object) -> Value:
    if not isinstance(name, str) or name not in values:
        raise ValueError(f"{option} = {name!r}: not one of {', '.join(values)}")
    return values[name]
