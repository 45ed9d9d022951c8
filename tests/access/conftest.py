"""A place for processes, as in the tests of two processes."""

from two_process.conftest import place

__all__ = ["place"]
