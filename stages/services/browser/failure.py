"""What goes wrong in a call of the browser."""

from __future__ import annotations


class Failure(Exception):
    """Why a call failed, in words for the model."""
