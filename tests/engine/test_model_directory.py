"""Every kind of broken model directory is refused at start, in one line that names the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import transformers

from specdec.engine.hf.pretrained import DTYPES, load
from specdec.engine.model_directory import LEFT_OUT, ModelDirectory
from specdec.engine.preflight.memory_needed import numbers_of_a_token
from specdec.engine.preflight.quantisation import check_outliers, quantised_by
from specdec.engine.unsupported import UnsupportedModelError
from tests.engine.broken_directories import (
    CONFIG,
    GENERATION,
    ODD_FILES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Break,
    become,
    edit,
    refused,
    write,
)
from tests.models import CONTEXT, END, VOCABULARY

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534
FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG)
VOCABULARIES = "must be an integer from 2 to 16777216"
CONTEXTS = "must be an integer from 64 to 1073741824"
ENDS = f"must be an integer from 0 to {VOCABULARY - 1}"
IDS = "an integer from 0 to 4294967295"
TEXT = "must be a string of Unicode characters"
ODD_CONTENTS: dict[str, tuple[bytes, str]] = {
    "list": (b"[1, 2]", "not a JSON object but [1, 2]"),
    "utf-16": ('{"vocab_size": 5}'.encode("utf-16"), "is not UTF-8"),
    "deep": (b'{"a": ' + b"[" * 100_000, "is nested too deeply, must have at most 64 levels"),
    "deep, in order": (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "is nested too deeply, must have at most 64 levels"),
}

ODD_NUMBERS: dict[str, tuple[Any, str]] = {
    "true": (True, "is true"),
    "float": (320.0, "is 320.0"),
    "string": ("320", 'is "320"'),
    "list": ([320], "is [320]"),
    "NaN": (float("nan"), "is NaN"),
    "0": (0, "is 0"),
    "1": (1, "is 1"),
    "-5": (-5, "is -5"),
    "2^40": (2**40, "is 1099511627776"),
}

ODD_ENDS: dict[str, tuple[Any, str]] = {
    "string": ("</s>", f'eos_token_id is "</s>", {ENDS}'),
    "true": (True, f"eos_token_id is true, {ENDS}"),
    "float": (2.0, f"eos_token_id is 2.0, {ENDS}"),
    "-1": (-1, f"eos_token_id is -1, {ENDS}"),
    "vocab_size": (VOCABULARY, f"eos_token_id is {VOCABULARY}, {ENDS}"),
    "2^40": (2**40, f"eos_token_id is {2**40}, {ENDS}"),
    "object": ({"id": 2}, f'eos_token_id is {{"id": 2}}, {ENDS}'),
    "nested": ([[2]], f"eos_token_id[0] is [2], {ENDS}"),
    "null in a list": ([2, None], f"eos_token_id[1] is null, {ENDS}"),
    "million": ([2] * 1_000_000, "eos_token_id has 1000000 entries, must have at most 1000"),
}

ODD_MODELS: dict[str, tuple[Any, str]] = {
    "number": (5, "model is 5, must be an object"),
    "no vocab": ({"type": "BPE"}, "model.vocab is missing, must be an object or a list"),
    "vocab": ({"vocab": "ab"}, 'model.vocab is "ab", must be an object or a list'),
    "id": ({"vocab": {"a": "1"}}, f'model.vocab has "1" as the id of "a", must have {IDS}'),
    "negative id": ({"vocab": {"a": -1}}, f'model.vocab has -1 as the id of "a", must have {IDS}'),
    "unigram": (
        {"vocab": [["a", 0.5], [1]]},
        "model.vocab has the entry [1], must have pairs of a token and its score",
    ),
    "unigram's token": ({"vocab": [[7, 0.5]]}, "model.vocab has the entry [7, 0.5], must have pairs"),
}

ODD_ADDED: dict[str, tuple[Any, str]] = {
    "object": ({"a": 1}, 'added_tokens is {"a": 1}, must be a list of objects'),
    "numbers": ([1], "added_tokens is [1], must be a list of objects"),
    "no content": ([{"id": 1}], f"added_tokens[0].content is missing, {TEXT}"),
    "no id": ([{"content": "a"}], f"added_tokens[0].id is missing, must be {IDS}"),
    "id": ([{"content": "a", "id": "1"}], f'added_tokens[0].id is "1", must be {IDS}'),
}


def without_generation_config(then: Break) -> Break:
    def broken(directory: Path) -> None:
        (directory / GENERATION).unlink()
        then(directory)

    return broken


def cases() -> Iterator[tuple[str, Break, str, str]]:
    """Yield (name, how to break a directory, the file to be named, the message)."""
    for file in FILES:
        for name, (making, said) in ODD_FILES.items():
            yield f"{file}-{name}", become(file, making), file, said
        for name, (content, said) in ODD_CONTENTS.items():
            yield f"{file}-{name}", write(file, content), file, said
    for name, (value, said) in ODD_NUMBERS.items():
        yield f"vocab_size-{name}", edit(CONFIG, vocab_size=value), CONFIG, f": vocab_size {said}, {VOCABULARIES}"
        for key in ("max_position_embeddings", "n_positions"):
            fields = {"max_position_embeddings": None, key: value}
            if value != 320 or isinstance(value, float):
                yield f"{key}-{name}", edit(CONFIG, **fields), CONFIG, f": {key} {said}, {CONTEXTS}"
    names_none = ": names no context length: neither max_position_embeddings nor n_positions"
    yield "no context", edit(CONFIG, max_position_embeddings=None), CONFIG, names_none
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    for name, (value, said) in ODD_ENDS.items():
        yield f"generation-{name}", edit(GENERATION, eos_token_id=value), GENERATION, f": {said}"
        alone = without_generation_config(edit(CONFIG, eos_token_id=value))
        yield f"config-{name}", alone, CONFIG, f": {said}"
        wrapper = without_generation_config(edit(CONFIG, eos_token_id=value, text_config=text))
        yield f"wrapper-{name}", wrapper, CONFIG, f": {said}"
        inside = without_generation_config(edit(CONFIG, eos_token_id=None, text_config=text | {"eos_token_id": value}))
        yield f"text_config-{name}", inside, CONFIG, f": text_config.{said}"
    for name, odd in {"list": [1], "string": "x", "number": 5, "true": True, "empty": []}.items():
        for key in ("text_config", "quantization_config", "rope_scaling", "rope_parameters"):
            said = f": {key} is {json.dumps(odd)}, must be an object"
            yield f"{key}-{name}", edit(CONFIG, **{key: odd}), CONFIG, said
    yield "text_config-0", edit(CONFIG, text_config=text | {"vocab_size": 0}), CONFIG, ": text_config.vocab_size is 0"
    yield "window", edit(CONFIG, sliding_window="x"), CONFIG, ': sliding_window is "x", must be an integer from 0 to'
    yarn = {"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": 64}
    said = ': rope_parameters.factor is "4", must be a finite number'
    yield "yarn", edit(CONFIG, rope_parameters=yarn), CONFIG, said
    for name, (value, said) in ODD_MODELS.items():
        yield f"model-{name}", edit(TOKENIZER, model=value), TOKENIZER, f": {said}"
    for name, (value, said) in ODD_ADDED.items():
        yield f"added-{name}", edit(TOKENIZER, added_tokens=value), TOKENIZER, f": {said}"
    no_tokens = edit(TOKENIZER, model={"vocab": {}}, added_tokens=[])
    yield "no tokens", no_tokens, TOKENIZER, ": model.vocab has no tokens"


CASES = list(cases())


@pytest.mark.parametrize(
    ("breaking", "file", "said"), [case[1:] for case in CASES], ids=[case[0].replace(" ", "_") for case in CASES]
)
def test_what_is_broken_is_named(directory: Path, breaking: Break, file: str, said: str) -> None:
    breaking(directory)
    line = refused(lambda: ModelDirectory(directory))
    assert line.startswith(str(directory / file))
    assert said in line


def test_a_file_that_is_too_large_is_not_read(directory: Path) -> None:
    with (directory / TOKENIZER_CONFIG).open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    line = refused(lambda: ModelDirectory(directory))
    assert line == f"{directory / TOKENIZER_CONFIG}: has {1 << 40} bytes, must have at most {1 << 28}"


def test_a_long_value_is_cut(directory: Path) -> None:
    edit(CONFIG, vocab_size="x\n" * 10_000)(directory)
    shown = '"' + "x\\n" * 20  # 61 characters
    assert refused(lambda: ModelDirectory(directory)).endswith(f"vocab_size is {shown[:60]}..., {VOCABULARIES}")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root's exemption from permissions."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_directory_that_may_not_be_entered(directory: Path) -> None:
    directory.parent.chmod(0)
    try:
        with unprivileged():
            assert refused(lambda: ModelDirectory(directory)) == f"{directory}: cannot be read: Permission denied"
    finally:
        directory.parent.chmod(0o700)


def test_a_name_that_no_file_has(tmp_path: Path) -> None:
    line = refused(lambda: ModelDirectory(tmp_path / ("x" * 300)))
    assert line.endswith("cannot be read: File name too long")


def test_a_link_is_served_by_its_own_name(directory: Path, tmp_path: Path) -> None:
    """The link's target may be named by a hash."""
    store = directory.rename(tmp_path / "5f3a9c")
    for link in (tmp_path / "big", tmp_path / "bigger"):
        link.symlink_to(store)
        assert ModelDirectory(link).name == link.name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "is a file, not the directory of a model: give its directory {folder}"),
        ("notes", "is a file, not the directory of a model: give the directory with config.json"),
    ],
)
def test_a_file_is_told_with_what_to_give_instead(tmp_path: Path, name: str, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"GGUF")
    assert refused(lambda: ModelDirectory(file)).startswith(f"{file}: {said.format(folder=tmp_path)}")


def test_a_directory_of_gguf_is_told(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    said = refused(lambda: ModelDirectory(tmp_path))
    assert said.startswith(f"{tmp_path}: no config.json, but model-q4.gguf: give the GGUF file itself")


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "big").symlink_to(tmp_path / "gone")
    said = refused(lambda: ModelDirectory(tmp_path / "big"))
    assert said == f"{tmp_path / 'big'}: a link to {tmp_path / 'gone'}, which does not exist"


def test_a_name_of_the_hub_is_told() -> None:
    said = refused(lambda: ModelDirectory(Path("owner/model-1b")))
    assert said.startswith(
        "owner/model-1b: no such directory; models are not downloaded automatically, use `hf download owner/model-1b"
    )


def test_a_name_that_no_message_can_carry(directory: Path) -> None:
    odd = directory.rename(os.fsdecode(os.fsencode(directory.parent) + b"/\xff"))
    assert refused(lambda: ModelDirectory(odd)).endswith("the directory's name is not UTF-8")


@pytest.mark.parametrize("kind", ODD_FILES)
def test_weights_that_cannot_be_read(directory: Path, kind: str) -> None:
    making, said = ODD_FILES[kind]
    become("model.safetensors", making)(directory)
    model = ModelDirectory(directory)  # an orchestrator needs no weights
    for use in (lambda: load(model, DTYPES["float32"], "cpu"), lambda: model.model_fingerprint):
        line = refused(use)
        assert line.startswith(str(directory / "model.safetensors"))
        assert said in line


def test_a_model_without_layers(directory: Path) -> None:
    edit(CONFIG, num_hidden_layers=0)(directory)
    line = refused(lambda: load(ModelDirectory(directory), DTYPES["float32"], "cpu"))
    assert line == f"{directory}/config.json: num_hidden_layers is 0, must be at least 1"


@pytest.mark.parametrize(
    ("key", "rope", "context"),
    [
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 32768}, 81_920),
        ("rope_parameters", {"full_attention": {"rope_type": "yarn", "factor": 2,
                                                "original_max_position_embeddings": 32768}}, 65_536),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 32_768),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, 32_768),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32_768),
        ("rope_parameters", {"rope_type": "linear", "factor": 4.0}, 32_768),
    ],
)  # fmt: skip
def test_yarn_extends_the_original_context(directory: Path, key: str, rope: dict[str, Any], context: int) -> None:
    """The configuration that Qwen2.5's model card advises, and others."""
    edit(CONFIG, max_position_embeddings=32_768, **{"rope_scaling": None, "rope_parameters": None, key: rope})(
        directory
    )
    assert ModelDirectory(directory).context == context


def test_what_overrules_a_wrong_end_token(directory: Path) -> None:
    """Some models are corrected in generation_config.json alone; null equals an absent field."""
    edit(CONFIG, eos_token_id=VOCABULARY, text_config=None, rope_scaling=None, n_positions=None)(directory)
    edit(GENERATION, eos_token_id=[END, END, 7])(directory)
    assert ModelDirectory(directory).end_tokens == {END, 7}
    edit(CONFIG, eos_token_id=None)(directory)
    edit(GENERATION, eos_token_id=None)(directory)
    assert ModelDirectory(directory).end_tokens == {END}  # the tokenizer's own
    edit(TOKENIZER_CONFIG, eos_token=None)(directory)
    assert ModelDirectory(directory).end_tokens == frozenset()


@pytest.mark.parametrize(
    ("program", "name", "breaking", "said"),
    [
        (
            ["-m", "orchestrator", "--port", "0", "--verifier", "127.0.0.1:1", "--model"],
            "orchestrator",
            "fifo",
            "chat_template.jinja",
        ),
        (
            ["-m", "verifier_service", "--port", "0", "--model"],
            "verifier",
            "eos",
            f'{GENERATION}: eos_token_id is "</s>", {ENDS}',
        ),
        (
            ["-m", "draft_service", "--port", "0", "--model"],
            "draft",
            "dangling",
            f'{CONFIG} (a link to "gone"): cannot be read',
        ),
        (["-m", "specdec.cli", "export"], "specdec", "deep", f"{TOKENIZER}: is nested too deeply"),
    ],
)
def test_a_program_says_one_line_and_ends(
    directory: Path, program: list[str], name: str, breaking: str, said: str
) -> None:
    breaks = {
        "fifo": become("chat_template.jinja", os.mkfifo),
        "eos": edit(GENERATION, eos_token_id="</s>"),
        "dangling": become(CONFIG, ODD_FILES["dangling"][0]),
        "deep": write(TOKENIZER, b"[" * 100_000),
    }
    breaks[breaking](directory)
    command = [sys.executable, *program, str(directory)]
    if name == "specdec":
        command.append(str(directory.parent / "exported"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == (2 if name == "specdec" else 1)  # for `specdec export` the directory is an argument
    assert out == ""
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"{name}: {directory}/{said}")


def multimodal(directory: Path, text: dict[str, Any], **fields: Any) -> ModelDirectory:
    """Return a model of text and images, with a separate text_config in config.json."""
    (directory / CONFIG).write_text(json.dumps({"model_type": "gemma3", "text_config": text} | fields))
    return ModelDirectory(directory)


def test_what_published_models_leave_out_is_what_transformers_takes(directory: Path) -> None:
    """Gemma 3's text_config has only the differences from its class's defaults."""
    default = transformers.Gemma3TextConfig()
    for model_type, fields in LEFT_OUT.items():
        assert model_type == "gemma3"
        assert {name: getattr(default, name) for name in fields} == fields
    found = multimodal(directory, {"hidden_size": 2560, "num_hidden_layers": 34})
    assert (found.vocabulary, found.context) == (262_208, 131_072)
    assert numbers_of_a_token(found) == 2 * 34 * 4 * 256


def test_quantised_weights_are_seen_beside_the_text_part(directory: Path) -> None:
    assert multimodal(directory, {}).quantisation is None
    found = multimodal(directory, {}, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(UnsupportedModelError, match="detects outliers over the whole batch"):
        check_outliers(found)
    assert quantised_by(found) == "bitsandbytes"


def test_only_the_tokens_of_a_tokenizer_are_kept(directory: Path) -> None:
    """Merges and normalizers of a large vocabulary would take 100 MB in each service."""
    content = json.loads((directory / TOKENIZER).read_text())
    assert content.keys() > {"added_tokens", "model"}
    kept = ModelDirectory(directory).tokenizer_files.tokenizer.content
    assert kept == {"added_tokens": content["added_tokens"], "model": {"vocab": content["model"]["vocab"]}}
