"""The engine of a conversation: the one whose prefix cache holds its earlier turns.

The engines are ranked by rendezvous hashing: each has a weight for each conversation, and the heaviest is its home.
All servers rank alike and keep no state for it, because a request and its history determine the conversation.  If an
engine leaves, only its own conversations move, and when it returns, they move back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import UNSET

from penstock.pipeline.frames import RequestFacts
from penstock.pipeline.protocol.history import is_given, opening

SESSION_HEADER = "X-Session-ID"
"""The header of a session, from clients and to engines: vLLM and its routers read it."""

FEW = 4
"""Generations that do not make an engine busy: it runs so few together nearly as fast as one."""

EXCESS = 1.5
"""The load of a busy engine, relative to the mean.  With 1.25, one turn in ten or five moves (`make affinity`)."""


def conversation_of(facts: RequestFacts) -> str:
    """Return a text that is the same for all turns of a conversation.

    A ``prompt_cache_key`` and a ``session_id`` have precedence, so that a client can have several conversations share
    an engine.
    """
    response, begun = facts.response, facts.origin.opening
    conversation = "" if response.conversation is UNSET else response.conversation.id
    key = response.prompt_cache_key or facts.scheduling.session
    return key or conversation or begun or opening(facts.input, response.id)


def is_new(facts: RequestFacts) -> bool:
    """Return True for the first turn of a conversation."""
    return not facts.origin.opening and not facts.origin.position and all(map(is_given, facts.input))


def session_id(facts: RequestFacts) -> str:
    """Return the id by which a router between keeps a conversation at one engine; it reveals no text."""
    return _digest(_key(facts), 16).hex()


def ranked(engines: Sequence[str], facts: RequestFacts) -> list[str]:
    """Return the engines from a conversation's home to its last resort."""
    key = _key(facts)
    return sorted(engines, key=lambda engine: _digest(f"{engine}\n{key}", 8), reverse=True)


def _key(facts: RequestFacts) -> str:
    """Return the conversation with its model and salt, as neither models nor salts share caches."""
    return "\n".join((conversation_of(facts), facts.model, facts.scheduling.cache_salt or ""))


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def load_limit(loads: Sequence[int]) -> int:
    """Return the load below which an engine takes one more turn, given the loads of all."""
    return max(FEW, math.ceil(EXCESS * (sum(loads) + 1) / len(loads)))
