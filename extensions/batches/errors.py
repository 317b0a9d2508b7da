"""The errors of batches that no client sees."""

from __future__ import annotations


class GivenUp(Exception):
    """A batch is another server's by now, or was cancelled: the work on it here has no effect."""
