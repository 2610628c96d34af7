"""The options of a request: each is defined once, with its type and meaning.

Type checkers read them from `Unpack[GenerateOptions]`. For introspection at run time (`help`, notebooks),
`takes_options` adds the same options to signature and docstring, as keyword parameters.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar, get_args, get_type_hints

from specdec.wire.speculation import OWN_NAMES, DrafterName, ScorerName, SpeculationName


class Message(TypedDict):
    """One turn of a conversation. Tool calls have the format of OpenAI's API. `reasoning` precedes the assistant's
    `content`; chat templates may include it."""

    role: str
    content: str
    reasoning: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class GenerateOptions(TypedDict, total=False):
    """The options of `generate` and `complete` besides the prompt. A missing option or None means the server's
    default."""

    tokens: Annotated[Sequence[int] | None, "The prompt as token ids, instead of text."]
    messages: Annotated[Sequence[Message] | None, "The prompt as a conversation, instead of text."]
    time: Annotated[
        datetime | None, "With `messages`: current time for the chat template. Default: arrival of the request."
    ]
    template_arguments: Annotated[
        Mapping[str, Any] | None, "With `messages`: variables of the model's chat template, by name."
    ]
    tools: Annotated[
        Sequence[Mapping[str, Any]] | None,
        "With `messages`: functions the model may call, in the format of OpenAI's API. Calls are part of the text; "
        "`specdec.wire.tool_calls` parses them.",
    ]
    tool_choice: Annotated[
        str | Mapping[str, Any] | None,
        "With `tools`: auto, required (only calls), none, or one function, in the format of OpenAI's API. Default: "
        "auto.",
    ]
    add_generation_prompt: Annotated[
        bool | None, "With `messages`: False ends the prompt after the last message. Default: True."
    ]
    continue_final_message: Annotated[
        bool | None, "With `messages`: True continues the content of the last message, in place of a new turn."
    ]
    split_reasoning: Annotated[bool | None, "False: reasoning stays in the text, with its marks. Default: True."]
    parallel_tool_calls: Annotated[bool | None, "With `tools`: False allows at most one call. Default: True."]
    truncate_prompt_tokens: Annotated[
        int | None,
        "Keep the last N tokens of the prompt. Special tokens around plain text count, and are kept. Default: all.",
    ]
    return_prompt_token_ids: Annotated[bool | None, "Send the prompt's token ids in the first chunk."]
    model: Annotated[str | None, "Model name, if several are served."]

    max_tokens: Annotated[
        int | None, "Maximum tokens to generate. Default: the model's own, else until the context is full."
    ]
    min_tokens: Annotated[int | None, "Minimum tokens before an end token or the end of a stop string."]
    stop: Annotated[str | Sequence[str] | None, "Stop strings: the text ends before the first one."]
    include_stop: Annotated[bool | None, "The text includes the stop string or end token that ended it."]
    show_special_tokens: Annotated[bool | None, "The text includes special tokens, except the end token."]
    stop_tokens: Annotated[Iterable[int] | None, "Token ids that end the text, in addition to the model's own."]
    ignore_end_token: Annotated[bool | None, "Continue past the model's end tokens."]
    n: Annotated[int | None, "Samples, 1 to 16. Default: 1."]
    logprobs: Annotated[
        int | None, "Return the log-probability of each token and of the N most probable ones, 0 to 20."
    ]
    prompt_logprobs: Annotated[
        int | None,
        "Return the tokens of the prompt. Every token except the first comes with its log-probability and with the N "
        "(0 to 20) most probable tokens at its position. `max_tokens` may then be 0.",
    ]

    ignore_generation_config: Annotated[bool | None, "Ignore the defaults in the model's generation_config.json."]
    temperature: Annotated[float | None, "Sampling temperature. Default: the model's own, else 0, which is greedy."]
    fallback_temperature: Annotated[
        float | None, "Temperature if neither `temperature` nor generation_config.json sets one. Default: 0."
    ]
    top_p: Annotated[float | None, "Sample from the smallest set of tokens whose probabilities sum to this, in (0, 1]."]
    top_k: Annotated[int | None, "Sample from the K most probable tokens; 0 keeps all."]
    min_p: Annotated[
        float | None, "Sample from tokens at least this probable relative to the most probable one, in [0, 1]."
    ]
    typical_p: Annotated[
        float | None,
        "Of the tokens left by top_k, top_p and min_p, sample from those whose surprisal is closest to the entropy, "
        "until their probabilities sum to this, in (0, 1].",
    ]
    repetition_penalty: Annotated[float | None, "In [0.01, 100]; 1 is off."]
    frequency_penalty: Annotated[float | None, "In [-2, 2]; 0 is off."]
    presence_penalty: Annotated[float | None, "In [-2, 2]; 0 is off."]
    logit_bias: Annotated[Mapping[int, float] | None, "Added to the logits, by token id; each in [-100, 100]."]
    banned_tokens: Annotated[Iterable[int] | None, "Token ids that are never chosen."]
    allowed_tokens: Annotated[
        Iterable[int] | None,
        "The only token ids that may be chosen, end tokens included. A grammar that permits none of them takes "
        "precedence.",
    ]
    bad_words: Annotated[
        Sequence[str] | None,
        "Texts that are never generated in their usual tokens: alone, after a space or after a line break.",
    ]
    seed: Annotated[int | None, "Sampling seed. Default: drawn by the server, and sent in the first chunk."]

    json_schema: Annotated[
        str | Mapping[str, Any] | None,
        "The text is a JSON value valid under this schema, given as JSON or as a mapping.",
    ]
    regex: Annotated[str | None, "The whole text matches this regular expression, in Rust's syntax."]
    lark: Annotated[str | None, "The text is derived from `start` of this context-free grammar, in Lark's syntax."]
    choice: Annotated[Sequence[str] | None, "The text is one of these."]
    grammar_after_token: Annotated[
        int | None,
        "With one of these four: the text is unconstrained up to and including the first token with this id.",
    ]

    speculation: Annotated[
        SpeculationName | None,
        "Which drafters may propose candidates. auto: the verifier's default, usually all, when it pays. draft: only "
        "draft services, when it pays. always: only draft services, even at a loss. local: only the verifier's own "
        f"proposers. {OWN_NAMES}: only this drafter. jacobi: only lookahead windows with "
        "n-grams of 2 tokens. off: none. Default: auto.",
    ]
    drafters: Annotated[
        Iterable[DrafterName] | None,
        "The drafters that may propose candidates, in place of `speculation`.",
    ]
    forced: Annotated[bool | None, "With `drafters` or `speculation`: use them even if they do not pay."]
    rule: Annotated[
        Literal["coupled", "rejection", "contrastive", "typical"] | None,
        "How candidates are accepted (docs/acceptance-rules.md). Default: coupled.",
    ]
    alpha: Annotated[
        float | None, "contrastive: minimum probability of a token, relative to the most probable one. Default: 0.1."
    ]
    amateur_temperature: Annotated[float | None, "contrastive: divides the draft's logits. Default: 1."]
    typical_epsilon: Annotated[float | None, "typical: accept a candidate above this probability. Default: 0.09."]
    typical_delta: Annotated[
        float | None,
        "typical: or above this times exp(-entropy) of the target's distribution. Default: 0.3.",
    ]
    max_candidates: Annotated[int | None, "Maximum candidates per step; 0: the server's default."]
    max_depth: Annotated[
        int | None, "Maximum tokens verified ahead of the last committed one; 0: the server's default."
    ]
    max_branches: Annotated[int | None, "Maximum alternatives at one position; 0: the server's default."]
    max_nodes: Annotated[int | None, "Maximum live candidates of a draft service; 0: the server's default."]
    min_path_probability: Annotated[
        float | None, "Pruning threshold of a draft service: less probable paths are not drafted further, in [0, 1)."
    ]
    scorer: Annotated[
        ScorerName | None,
        "How a draft service scores candidates. calibrated: by what the target has accepted; probability: by the "
        "draft's probability.",
    ]
    expansion: Annotated[
        Sequence[int] | None,
        "Fixed widths of a draft service's token tree, as in SpecInfer: children of a node by its depth.",
    ]
    lookahead: Annotated[
        tuple[int, int, int] | None,
        "Use a lookahead window of this size, even at a loss: W positions, n-grams of N tokens, G guesses.",
    ]
    jacobi: Annotated[
        int | None,
        "Jacobi decoding with a window of W positions, even at a loss; the same as a `lookahead` of W, 2, 1.",
    ]

    rejected_candidates: Annotated[bool | None, "Return the candidates that were verified and rejected."]

    tenant: Annotated[str | None, "Name of the tenant. The prefix cache is shared only within a tenant."]
    cache_salt: Annotated[
        str | None, "Share the prefix cache only with the tenant's requests with the same salt; at most 256 characters."
    ]
    learn: Annotated[
        bool | None, "Permit draft services to keep this text, prompt included, and to learn from it. Default: no."
    ]
    priority: Annotated[int | None, "Order among waiting requests of the same tenant: lower goes first. Default: 0."]
    generated_tokens: Annotated[
        Sequence[int] | None, "Resume an interrupted text with these tokens; needs its seed, and n = 1."
    ]
    prompt_digest: Annotated[
        str | None,
        "With `generated_tokens`: `prompt_digest` of the first chunk's `resolved`; a different prompt is then refused.",
    ]
    model_fingerprint: Annotated[
        str | None,
        "With `generated_tokens`: `model_fingerprint` of the text's first chunk; a different model is then refused.",
    ]


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(function: Function) -> Function:
    """Add the options to the signature and docstring of a function with `**options`."""
    hints = get_type_hints(GenerateOptions, include_extras=True)
    types, meanings = zip(*(get_args(hint) for hint in hints.values()), strict=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in zip(hints, types, strict=True)
    ]
    signature = inspect.signature(function)
    own = [
        parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    described = [
        textwrap.fill(f"{name}: {meaning}", 100, initial_indent="    ", subsequent_indent="        ")
        for name, meaning in zip(hints, meanings, strict=True)
    ]
    setattr(function, "__signature__", signature.replace(parameters=[*own, *options]))  # noqa: B010 (mypy)
    intro = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = "\n".join([intro, "", "Options; None is the server's default:", *described])
    return function
