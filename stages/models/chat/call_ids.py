"""The ids of calls in the prompts of chat models.

Most templates show no ids, or only compare them.  A family whose template shows them was trained with ids of one form,
and calls wrongly, or not at all, after others.  The client keeps its own ``call_id``.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TypeAlias

CallId: TypeAlias = Callable[[str, int, str], str]
"""Returns the id of a call by its function, its index among all calls of the conversation, and its id in the API."""


def id_of_client(name: str, index: int, call_id: str) -> str:
    """Return the id in the API."""
    return call_id


def function_and_index(name: str, index: int, call_id: str) -> str:
    """Return ``functions.NAME:INDEX``, as Kimi K2 does."""
    return f"functions.{name}:{index}"


def index_alone(name: str, index: int, call_id: str) -> str:
    """Return the index, as Cohere's models do."""
    return str(index)


_CHARACTERS = 9


def nine_characters(name: str, index: int, call_id: str) -> str:
    """Return an id of nine letters and digits, which are all that Mistral's templates take."""
    if len(call_id) == _CHARACTERS and call_id.isascii() and call_id.isalnum():
        return call_id
    return sha256(call_id.encode()).hexdigest()[:_CHARACTERS]
