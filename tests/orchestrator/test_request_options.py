"""Options of vLLM's requests: what is kept of a prompt, which tokens may be chosen, and what the text includes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.requests.sample import Sample, resolved
from orchestrator.requests.tokenization import tokenize
from orchestrator.text.transcript import SampleTranscript
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.errors import InvalidRequestError, PromptTooLongError
from specdec.v2 import generation_pb2 as pb
from specdec.v2 import model_pb2, verifier_pb2
from tests.models import make
from tests.text.tokenizers import directory, sentencepiece, word_level

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BEGIN, END, POINT, WORLD, HELLO, W0 = 2, 3, 4, 6, 7, 8
TEMPLATE = (
    "{% for m in messages %}<s> {{ m.content | trim }} </s> {% endfor %}{% if add_generation_prompt %}hello{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Return a model whose tokens are words, with special tokens around a plain text."""
    words = word_level()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    folder: Path = tmp_path_factory.mktemp("models") / "m"
    return ServedModel.of(directory(words, folder, chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Return a model whose tokens are bytes."""
    return ServedModel.of(ModelDirectory(make("llama", tmp_path_factory.mktemp("models") / "m")))


def parsed(model: ServedModel, **fields: Any) -> Sample:
    (sample,) = parse(pb.GenerateRequest(**{"text": "w0"} | fields), model).samples
    return sample


def refused(model: ServedModel, **fields: Any) -> str:
    """Return the only field that is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        parsed(model, **fields)
    ((field, _),) = caught.value.violations
    return field


def sampling(**fields: Any) -> pb.SamplingParameters:
    return pb.SamplingParameters(**fields)


def turns(*contents: str, **fields: Any) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=content) for content in contents], **fields)


def test_a_truncated_text_keeps_its_end_and_the_special_tokens(model: ServedModel) -> None:
    text = "w0 w1 w2 w3"
    assert parsed(model, text=text).prompt == [BEGIN, *range(W0, W0 + 4), END]
    assert parsed(model, text=text, truncate_prompt_tokens=4).prompt == [BEGIN, W0 + 2, W0 + 3, END]
    assert parsed(model, text=text, truncate_prompt_tokens=200).prompt == parsed(model, text=text).prompt
    assert refused(model, text=text, truncate_prompt_tokens=2) == "truncate_prompt_tokens"
    assert refused(model, text=text, truncate_prompt_tokens=256) == "truncate_prompt_tokens"


def test_other_prompts_keep_their_last_tokens(model: ServedModel) -> None:
    tokens = pb.TokenPrompt(ids=[9, 10, 11])
    assert parsed(model, text=None, tokens=tokens, truncate_prompt_tokens=2).prompt == [10, 11]
    chat = parsed(model, text=None, chat=turns("w0 w1"), truncate_prompt_tokens=3)
    assert chat.prompt == [W0 + 1, END, HELLO]
    assert resolved(chat, "").prompt_tokens == 3


def test_a_prompt_longer_than_the_context_may_be_truncated(model: ServedModel) -> None:
    long = {"text": ". " * 600}
    assert len(parsed(model, **long, truncate_prompt_tokens=100).prompt) == 100
    with pytest.raises(PromptTooLongError, match="the context of 256 leaves no room"):
        parsed(model, **long)
    tokens = pb.TokenPrompt(ids=[9] * 1025)
    with pytest.raises(PromptTooLongError, match="has 1025 tokens, must have at most 1024"):
        parsed(model, text=None, tokens=tokens, truncate_prompt_tokens=100)


def test_the_allowed_tokens_ban_all_others(model: ServedModel) -> None:
    allowed = parsed(model, sampling=sampling(allowed_tokens=[HELLO, END], banned_tokens=[HELLO]))
    assert allowed.sampling.banned_tokens == set(range(model.vocabulary)) - {END}
    assert refused(model, sampling=sampling(allowed_tokens=[HELLO, model.vocabulary])) == "sampling.allowed_tokens[1]"
    assert not parsed(model).sampling.banned_tokens


def test_bad_words_are_banned_as_their_tokens(model: ServedModel) -> None:
    found = parsed(model, sampling=sampling(bad_words=["hello", " world w0", "w0 hello"], banned_tokens=[END])).sampling
    assert found.banned_tokens == {END, HELLO}
    assert found.banned_sequences == {(WORLD, W0)}  # "w0 hello" ends with a banned token
    for words, index in ((["hello", ""], 1), ([" "], 0), (["x" * 257], 0), (["w0 " * 65], 0)):
        assert refused(model, sampling=sampling(bad_words=words)) == f"sampling.bad_words[{index}]"
    assert refused(model, sampling=sampling(bad_words=["hello"] * 257)) == "sampling.bad_words"
    only = sampling(bad_words=["hello world"], allowed_tokens=[WORLD])
    assert refused(model, sampling=only) == "sampling.banned_sequences"


def test_a_bad_word_is_banned_after_a_space_too(byte_level: ServedModel) -> None:
    """Its tokens differ after a space."""
    encode = byte_level.tokenizer.encode
    spelled = {tuple(encode(text, special=False)) for text in ("no way", " no way")}
    assert len(spelled) == 2
    for word in ("no way", "  no way"):
        assert parsed(byte_level, sampling=sampling(bad_words=[word])).sampling.banned_sequences == spelled


def test_a_bad_word_is_banned_without_the_space_that_a_tokenizer_adds(tmp_path: Path) -> None:
    """Such a tokenizer never makes the token of a text that begins with the word, but a model may write it after a
    bracket."""
    adding = sentencepiece(["world", " world"])
    model = ServedModel.of(directory(adding, tmp_path / "m"))
    found = parsed(model, sampling=sampling(bad_words=["world"])).sampling
    assert {adding.token_to_id("world"), adding.token_to_id("\u2581world")} <= found.banned_tokens


def test_the_last_message_may_be_continued(model: ServedModel) -> None:
    """The template's text after the message's content is left out, and white space that it would trim there is kept."""
    whole = parsed(model, text=None, chat=turns("w0", "w1 hello")).prompt
    assert whole == [BEGIN, W0, END, BEGIN, W0 + 1, HELLO, END, HELLO]
    continued = parsed(model, text=None, chat=turns("w0", "w1 hello", continue_final_message=True)).prompt
    assert continued == whole[:-2]
    bare = parsed(model, text=None, chat=turns("w0", "w1 hello", no_generation_prompt=True)).prompt
    assert bare == whole[:-1]
    rendered = model.tokenizer.render([{"role": "user", "content": "end "}], NOON, continues=True)
    assert rendered == "<s> end "
    calling = turns("w0", continue_final_message=True)
    calling.messages[0].tool_calls.add(name="f", arguments="{}")
    assert refused(model, text=None, chat=calling)


def test_a_template_that_hides_the_content_is_named(tmp_path: Path) -> None:
    deaf = ServedModel.of(directory(word_level(), tmp_path / "m", chat_template="{{ messages | length }}"))
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        parsed(deaf, text=None, chat=turns("w0", continue_final_message=True))


@pytest.mark.parametrize(
    ("fields", "tokens", "text", "stop"),
    [
        ({}, [HELLO, BEGIN, WORLD, END], "hello world", ""),
        ({"show_special_tokens": True}, [HELLO, BEGIN, WORLD, END], "hello <s> world", ""),
        ({"show_special_tokens": True, "include_stop": True}, [HELLO, WORLD, END], "hello world </s>", ""),
        ({"include_stop": True}, [HELLO, WORLD, END], "hello world", ""),
        ({"include_stop": True, "stop": ["world"]}, [HELLO, WORLD, W0], "hello world", "world"),
        ({"stop": ["world"]}, [HELLO, WORLD, W0], "hello ", "world"),
        ({"include_stop": True, "stop_tokens": [POINT]}, [HELLO, POINT], "hello .", ""),
        ({"stop_tokens": [POINT]}, [HELLO, POINT], "hello", ""),
        ({"include_stop": True, "stop": ["</s>"]}, [HELLO, END], "hello</s>", "</s>"),
    ],
)
def test_what_the_text_includes(
    model: ServedModel, fields: dict[str, Any], tokens: list[int], text: str, stop: str
) -> None:
    sample = parsed(model, text=None, tokens=pb.TokenPrompt(ids=[W0]), **fields)
    ends = tokens[-1] in sample.end_tokens | {END}
    for pieces in ([tokens], [[token] for token in tokens]):
        transcript, told = SampleTranscript(sample, model, 0.0), ""
        for index, piece in enumerate(pieces):
            reason = model_pb2.FINISH_REASON_STOP if ends else model_pb2.FINISH_REASON_LENGTH
            commit = verifier_pb2.Commit(
                committed=model_pb2.Committed(tokens=piece),
                sources=[model_pb2.TOKEN_SOURCE_PLAIN] * len(piece),
                steps=len(piece),
                finish_reason=reason if index == len(pieces) - 1 else model_pb2.FINISH_REASON_UNSPECIFIED,
            )
            response = transcript.add_commit(commit)
            assert response is not None
            told += response.text
            if response.HasField("finish"):
                assert response.finish.stop == stop
                break
        assert told == f" {text}"  # after the prompt's word


def test_tokens_are_spelt_with_special_ones(model: ServedModel) -> None:
    asked = pb.TokenizeRequest(tokens=pb.TokenPrompt(ids=[BEGIN, HELLO]), text_of_tokens=True)
    assert tokenize(asked, model).text == "<s> hello"
    asked.text_of_tokens = False
    assert tokenize(asked, model).text == ""
