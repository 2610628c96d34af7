"""The models of the service tests serve here too."""

from tests.faults.conftest import models
from tests.services.conftest import directories

__all__ = ["directories", "models"]
