"""The error of a browser call."""

from __future__ import annotations


class Failure(Exception):
    """A call failed; the message is written for the model."""
