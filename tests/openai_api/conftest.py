"""Models of the service tests and of the fault suite, and a pair with reasoning."""

from pathlib import Path

import pytest

from specdec.wire.tool_formats import HERMES
from tests.faults.cluster import Models
from tests.faults.conftest import made
from tests.reasoning import TEMPLATE, reasoning_model
from tests.services.conftest import directories
from tests.tool_templates import TEMPLATES

__all__ = ["directories"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return made(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reasoning_pair(models: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a target with reasoning and tools, and a draft close to it."""
    folder = tmp_path_factory.mktemp("reasoning")
    template = "{% if tools %}" + TEMPLATES[HERMES] + "{% if opened %}<think>\n{% endif %}{% else %}" + TEMPLATE
    template += "{% endif %}"
    return (
        reasoning_model(models.target, folder / "target", template),
        reasoning_model(models.draft, folder / "draft", template),
    )
