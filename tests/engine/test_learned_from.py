"""The record of tenants whose texts a model has learned from: without names, beside the weights, read or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_file import ModelDirectoryError

TIMES = st.dictionaries(st.text(max_size=4), st.floats(0, 1e10), max_size=5)


def by_digest(times: dict[str, float]) -> dict[str, float]:
    return {tenant_digest(tenant): at for tenant, at in times.items()}


@given(first=TIMES, second=TIMES)
def test_the_oldest_text_of_each_tenant_counts(
    tmp_path_factory: pytest.TempPathFactory, first: dict[str, float], second: dict[str, float]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / LEARNED_FROM).write_text(json.dumps(LearnedFrom().with_texts(by_digest(first)).content))
    read = LearnedFrom.of(folder)
    assert read is not None
    found = read.with_texts(by_digest(second))
    for tenant in {*first, *second}:
        oldest = min(times[tenant] for times in (first, second) if tenant in times)
        assert found.has(tenant_digest(tenant), oldest)
        assert not found.has(tenant_digest(tenant), oldest - 1)
    assert not found.has(tenant_digest("somebody else"), float("inf"))


def test_two_files_do_not_show_that_they_have_a_tenant_in_common() -> None:
    contents = [json.dumps(LearnedFrom().with_texts(by_digest({"acme": 1.0})).content) for _ in range(2)]
    hashes = [set(re.findall("[0-9a-f]{64}", content)) for content in contents]
    assert all(hashes)
    assert not hashes[0] & hashes[1]
    assert not any(tenant_digest("acme") in content or "acme" in content for content in contents)


def test_without_a_file_a_model_has_learned_from_nobody(tmp_path: Path) -> None:
    assert LearnedFrom.of(tmp_path) is None


SALT = "0" * 32


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "not a JSON object"),
        ('{"tenants": {}}', "salt is missing"),
        ('{"salt": "xyz", "tenants": {}}', "salt is .*must be 32 hexadecimal digits"),
        (f'{{"salt": "{SALT}", "tenants": ["{"0" * 64}"]}}', "tenants is .*must be an object"),
        (f'{{"salt": "{SALT}", "tenants": {{"acme": 1}}}}', 'tenants has "acme", must have SHA-256 digests'),
        (f'{{"salt": "{SALT}", "tenants": {{"{"0" * 64}": "now"}}}}', "must be a finite number"),
        (f'{{"salt": "{SALT}", "tenants": {{"{"0" * 64}": NaN}}}}', "must be a finite number"),
    ],
)
def test_what_cannot_be_understood_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / LEARNED_FROM).write_text(content)
    with pytest.raises(ModelDirectoryError, match=problem):
        LearnedFrom.of(tmp_path)
