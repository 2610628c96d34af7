"""The options of a request: each defined once, with its type and its meaning.

Type checkers read them from `Unpack[GenerateOptions]`. For introspection at run time (`help`, notebooks),
`takes_options` adds the same options to signature and docstring as keyword parameters.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar, get_args, get_type_hints

SpeculationChoice = Literal["auto", "off", "always", "draft", "local"]
"""Named sets of drafters; the option `speculation` explains them."""


class Message(TypedDict):
    """One turn of a conversation. Tool calls are in the form of OpenAI's API. `reasoning` preceded the assistant's
    `content`; chat templates may repeat it."""

    role: str
    content: str
    reasoning: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class GenerateOptions(TypedDict, total=False):
    """The options of `generate` and `complete` besides the prompt. Absent and None mean the server's default."""

    tokens: Annotated[Sequence[int] | None, "The prompt as token ids, instead of text."]
    messages: Annotated[Sequence[Message] | None, "The prompt as a conversation, instead of text."]
    time: Annotated[datetime | None, "With `messages`: the present time to the chat template. Default: on arrival."]
    template_arguments: Annotated[
        Mapping[str, Any] | None, "With `messages`: variables that the model's chat template takes, by name."
    ]
    tools: Annotated[
        Sequence[Mapping[str, Any]] | None,
        "With `messages`: functions that the model may call, as OpenAI's API has them. Calls are part of the text: "
        "`specdec.client.tool_calls` reads them.",
    ]
    tool_choice: Annotated[
        str | Mapping[str, Any] | None,
        "With `tools`: auto, required (calls alone), none, or one function, as OpenAI's API has it. Default: auto.",
    ]
    split_reasoning: Annotated[
        bool | None, "False: what the model thinks before it answers is part of the text, marks included."
    ]
    parallel_tool_calls: Annotated[bool | None, "With `tools`: False allows one call at most. Default: True."]
    model: Annotated[str | None, "The one to ask, where several are served."]

    max_tokens: Annotated[
        int | None, "Most tokens to generate. Default: the model's own, else as many as the context holds."
    ]
    min_tokens: Annotated[int | None, "No end token before this many."]
    stop: Annotated[str | Sequence[str] | None, "The text ends before the first of these strings."]
    stop_tokens: Annotated[Iterable[int] | None, "Token ids that end the text besides the model's own."]
    ignore_end_token: Annotated[bool | None, "Go on past the model's end token."]
    n: Annotated[int | None, "Samples, 1 to 16. Default: 1."]
    logprobs: Annotated[
        int | None, "Send the log-probability of each token and of this many of the most probable ones, 0 to 20."
    ]

    ignore_generation_config: Annotated[
        bool | None, "Where options are absent, take no defaults of the model's generation_config.json."
    ]
    temperature: Annotated[float | None, "Temperature of sampling. Default: the model's own, else 0, which is greedy."]
    fallback_temperature: Annotated[
        float | None, "The temperature where neither `temperature` nor generation_config.json says one. Default: 0."
    ]
    top_p: Annotated[float | None, "Sample from the fewest tokens whose probabilities add up to this much, in (0, 1]."]
    top_k: Annotated[int | None, "Sample from so many of the most probable tokens; 0 keeps all."]
    min_p: Annotated[
        float | None, "Sample from tokens with at least this probability, relative to the best one's, in [0, 1)."
    ]
    repetition_penalty: Annotated[float | None, "In [0.01, 100]; 1 is off."]
    frequency_penalty: Annotated[float | None, "In [-2, 2]; 0 is off."]
    presence_penalty: Annotated[float | None, "In [-2, 2]; 0 is off."]
    logit_bias: Annotated[Mapping[int, float] | None, "Added to the logits, by token id; each in [-100, 100]."]
    banned_tokens: Annotated[Iterable[int] | None, "Token ids that are never chosen."]
    seed: Annotated[int | None, "Seed of sampling. Default: drawn by the server, and sent in the first chunk."]

    json_schema: Annotated[
        str | Mapping[str, Any] | None, "The text is a JSON value that this schema describes, as JSON or as a mapping."
    ]
    regex: Annotated[str | None, "The whole text matches this regular expression, in Rust's syntax."]
    lark: Annotated[str | None, "The text is what this context-free grammar, in Lark's syntax, derives from `start`."]
    choice: Annotated[Sequence[str] | None, "The text is one of these."]
    grammar_after_token: Annotated[
        int | None, "With one of these four: the text is free up to and including the first token with this id."
    ]

    speculation: Annotated[
        SpeculationChoice | None,
        "Who may propose candidates. auto: all drafters, where that pays. draft: draft services alone, where that "
        "pays. always: likewise, even at a loss. local: the verifier's own proposers alone. off: nobody.",
    ]
    drafters: Annotated[
        Iterable[Literal["remote", "ngram", "lookahead", "local_model"]] | None,
        "The only ones that may propose candidates, in place of `speculation`.",
    ]
    forced: Annotated[bool | None, "With `drafters`: use them even where they are found not to pay."]
    rule: Annotated[Literal["coupled", "rejection", "contrastive"] | None, "How candidates become tokens."]
    alpha: Annotated[
        float | None, "contrastive: least probability of a token, relative to the most probable one's. Default: 0.1."
    ]
    amateur_temperature: Annotated[float | None, "contrastive: divides the draft's logits. Default: 1."]
    max_candidates: Annotated[int | None, "Candidates verified in one step at most; 0 is the server's default."]
    max_depth: Annotated[int | None, "Tokens drafted ahead at most; 0 is the server's default."]
    max_branches: Annotated[int | None, "Alternatives at one place at most; 0 is the server's default."]
    lookahead: Annotated[
        tuple[int, int, int] | None,
        "Use a lookahead window of this size, whether or not it pays: W positions, N-grams, G guesses.",
    ]

    tenant: Annotated[str | None, "Computed prompts are shared within a tenant only."]
    priority: Annotated[int | None, "Among waiting requests of the same tenant: lower goes first. Default: 0."]
    generated_tokens: Annotated[
        Sequence[int] | None, "Resume a text that broke off with these tokens; needs its seed, and n = 1."
    ]
    prompt_digest: Annotated[
        str | None, "With `generated_tokens`: that of the first chunk's `resolved`; another prompt is then refused."
    ]
    model_fingerprint: Annotated[
        str | None, "With `generated_tokens`: that of the text's first chunk; on another model it is then refused."
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
