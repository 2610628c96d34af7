"""Parsing of the tenants file, and error messages that name what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.tenants.file import Tenant, TenantsFile, TenantsFileError
from specdec import api_keys

ONE, OTHER = (api_keys.hash_of(each) for each in ("one", "other"))


def file(tmp_path: Path, text: str) -> TenantsFile:
    (tmp_path / "tenants.yaml").write_text(text)
    return TenantsFile(tmp_path / "tenants.yaml")


def test_tenants_are_found_by_each_of_their_keys(tmp_path: Path) -> None:
    found = file(
        tmp_path,
        f"""
tenants:
  acme:
    api_keys: ["{ONE}", "{OTHER}"]
    class: gold
    weight: 2
    max_concurrent_requests: 3
    requests_per_minute: 60
    tokens_per_minute: 1000
  watchers: {{api_keys: ["{api_keys.hash_of("third")}"], operator: true, learn: true}}
""",
    ).read()
    acme = Tenant("acme", (ONE, OTHER), False, "gold", 2, 3, 60, 1000)
    assert found[ONE] == found[OTHER] == acme
    assert found[api_keys.hash_of("third")] == Tenant(
        "watchers", (api_keys.hash_of("third"),), operator=True, learn=True
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be `tenants:` with at least one tenant by name"),
        ("tenants: {}", "must be `tenants:` with at least one tenant by name"),
        ("tenants: [acme]", "must be `tenants:` with at least one tenant by name"),
        (f"tenants: {{acme: {{api_keys: ['{ONE}']}}}}\nlimits: 3", "must be `tenants:`"),
        ("tenants: {acme: {}}", "tenants.'acme': api_keys: must be a list of at least one hash"),
        ("tenants: {acme: 3}", "tenants.'acme': must have `api_keys`"),
        (f"tenants: {{'': {{api_keys: ['{ONE}']}}}}", "must be a name of 1 to 256 characters"),
        (
            f"tenants: {{a: {{api_keys: ['{ONE}'], wieght: 2}}}}",
            "'wieght' must be one of api_keys, operator, class",
        ),
        ("tenants: {a: {api_keys: [secret]}}", "api_keys[0]: must be sha256: and 64 hex digits"),
        (f"tenants: {{a: {{api_keys: ['{ONE}', '{ONE}']}}}}", "api_keys[1]: is given twice"),
        (f"tenants: {{a: {{api_keys: ['{ONE}']}}, b: {{api_keys: ['{ONE}']}}}}", "tenants.'b': api_keys: sha256:"),
        (f"tenants: {{a: {{api_keys: ['{ONE}'], weight: 0}}}}", "weight: is 0, must be from 0.01 to 100"),
        (f"tenants: {{a: {{api_keys: ['{ONE}'], weight: .nan}}}}", "weight: is nan, must be from 0.01 to 100"),
        (f"tenants: {{a: {{api_keys: ['{ONE}'], weight: true}}}}", "weight: is True, must be from 0.01 to 100"),
        (f"tenants: {{a: {{api_keys: ['{ONE}'], operator: 'no'}}}}", "operator: is 'no', must be true or false"),
        (f"tenants: {{a: {{api_keys: ['{ONE}'], learn: 1}}}}", "learn: is 1, must be true or false"),
        (f"tenants: {{a: {{api_keys: ['{ONE}'], class: Gold}}}}", "class: is 'Gold', must be 1 to 32 of a to z"),
        (
            f"tenants: {{a: {{api_keys: ['{ONE}'], tokens_per_minute: 1.5}}}}",
            "tokens_per_minute: is 1.5, must be an integer from 1 to 1000000000000",
        ),
        (f"tenants: {{a: {{api_keys: ['{ONE}'], weight: 1, weight: 2}}}}", "weight is given twice"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(TenantsFileError) as refused:
        file(tmp_path, text).read()
    assert why in str(refused.value)
    assert str(refused.value).startswith(f"--tenants {tmp_path}/tenants.yaml: ")
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)  # a possible key is not repeated


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError, match=r"--tenants .*none\.yaml: No such file or directory"):
        TenantsFile(tmp_path / "none.yaml").read()


def test_a_syntax_error_is_told_without_the_line_which_may_have_a_key(tmp_path: Path) -> None:
    text = 'tenants:\n  acme:\n    api_keys: ["specdec-SECRETSECRET"\n    weight: 2\n'
    with pytest.raises(TenantsFileError) as refused:
        file(tmp_path, text).read()
    assert "SECRETSECRET" not in str(refused.value)
    assert "line 4, column 5: while parsing a flow sequence, expected ',' or ']'" in str(refused.value)
