"""Every run ends with a list of the tests that were left out."""

from tests.support.left_out import pytest_configure

__all__ = ["pytest_configure"]
