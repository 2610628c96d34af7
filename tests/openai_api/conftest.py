"""The models of the service tests serve here too."""

from tests.services.conftest import directories

__all__ = ["directories"]
