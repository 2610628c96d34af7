"""Supported options and versions of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.engine.preflight import vllm_version as versions
from specdec.engine.unsupported import UnsupportedModelError
from specdec.engine.vllm.options import OWN, check_options, read_options


def test_options_are_a_json_object() -> None:
    assert read_options('{"tensor_parallel_size": 2}') == {"tensor_parallel_size": 2}
    for text in ("", "[1]", "quantization=fp8", '"fp8"'):
        with pytest.raises(ValueError, match="JSON"):
            read_options(text)


@pytest.mark.parametrize("name", OWN)
def test_options_of_our_own_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} cannot be set: "):
        check_options({"quantization": "fp8", name: None})
    check_options({"quantization": "fp8"})


@pytest.mark.parametrize("size", ["2", 0, 1.5, True, None])
def test_only_a_positive_integer_is_a_number_of_parts(size: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel_size is .*, must be an integer of at least 1"):
        check_options({"tensor_parallel_size": size})
    check_options({"tensor_parallel_size": 2})


def test_options_that_would_do_nothing_are_among_them() -> None:
    for names in (
        ("spec_method", "spec_model", "spec_tokens"),
        ("logits_processors", "watermark_config", "logprobs_mode", "max_logprobs"),
        ("override_generation_config", "scheduling_policy", "device_ids"),
    ):
        assert OWN.keys() >= set(names)


@pytest.mark.parametrize(("device", "for_cpus"), [("cpu", False), ("cuda", True)])
def test_a_device_that_vllm_was_not_built_for_is_refused(device: str, for_cpus: bool) -> None:
    """vLLM would fall back to the devices it was built for."""
    other = "cuda" if device == "cpu" else "cpu"
    versions.check_build(other, for_cpus=for_cpus)
    with pytest.raises(
        UnsupportedModelError, match=f"device {device}: the installed vLLM is a build for .*: use --device {other},"
    ):
        versions.check_build(device, for_cpus=for_cpus)


@pytest.mark.parametrize("distribution", versions.DISTRIBUTIONS)
def test_only_tested_versions_are_taken(distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="vLLM is not installed: pip install"):
        versions.check_vllm()
    for version, taken in (("0.31.4", False), ("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", False)):
        folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if taken:
            versions.check_vllm()
        else:
            with pytest.raises(UnsupportedModelError, match=f"vLLM {version} is installed.*>=0.32"):
                versions.check_vllm()
        (folder / "METADATA").unlink()
        folder.rmdir()
