"""Reuses the models of the service tests and of the fault suite."""

import pytest

from tests.faults.cluster import Models
from tests.faults.conftest import made
from tests.services.conftest import directories

__all__ = ["directories"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return made(tmp_path_factory.mktemp("models"))
