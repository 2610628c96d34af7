"""Reuses the models of the service tests."""

from tests.services.conftest import directories

__all__ = ["directories"]
