"""The models of the tests of the services, for evaluations too."""

from tests.services.conftest import directories

__all__ = ["directories"]
