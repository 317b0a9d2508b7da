"""The engine of a conversation: the one whose prefix cache holds its earlier turns.

Each engine has some places on a circle, and each conversation some others.  The engines are ranked by how far before
one of their places a conversation has one, and the nearest is its home.  All servers rank alike and keep no state for
it, because a request and its history determine the conversation.  If an engine leaves, only its own conversations move,
and when it returns, they move back.  With ten thousand engines, the first ranks take no longer than with a hundred.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator
from hashlib import blake2b
from heapq import heapify, heapreplace
from struct import unpack

from msgspec import UNSET

from penstock.pipeline.frames import RequestFacts
from penstock.pipeline.protocol.history import is_given, opening

SESSION_HEADER = "X-Session-ID"
"""The header of a session, from clients and to engines: vLLM and its routers read it."""

RANK_HEADER = "X-data-parallel-rank"
"""The header of the engine core that gets a prompt, from routers to vLLM."""

NEAREST = 8
"""Engines of a conversation's ranking of which one gets its turn."""

STRANGERS = 2
"""Engines that may get it, too, one after the other of all, so that many turns at once are not bound to a few."""

FARTHEST = 256
"""Engines of a conversation's ranking that are looked at, before any other that is healthy."""

WORTH = 3_000
"""Tokens of a prompt that are as much work as one more generation in a batch (`make fleet`)."""

RETURNING = 0.25
"""Share of a new conversation's prompt that its next turns are expected to read again, if it begins elsewhere."""

PLACES = 8
"""Places of an engine, and of a conversation: the conversations of engines then differ by 8 % (standard deviation)."""

_CIRCLE = 2**64
"""Places on the circle."""


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


def hinted_session(facts: RequestFacts) -> str:
    """Return the name of a conversation in a `CacheHint`; it reveals no text.

    Those of two API keys have two names, so that no key lets another's go.  The line of a batch has the name of its
    response.
    """
    if facts.origin.line:
        return facts.response_id
    return _digest("\n".join((facts.origin.owner, _key(facts))), 16).hex()


class Ranking:
    """Engines in the order in which they suit a conversation."""

    def __init__(self, engines: Collection[str]) -> None:
        round_ = sorted((place, engine) for engine in set(engines) for place in _places(engine))
        self._size = len(round_) // PLACES
        self._round = [*round_, *((place + _CIRCLE, engine) for place, engine in round_)]

    def of(self, facts: RequestFacts) -> Iterator[str]:
        """Yield the engines from a conversation's home to its last resort."""
        near = []
        for place in _places(_key(facts)):
            number = bisect(self._round, (place, ""))
            near.append((self._round[number][0] - place, number, place))
        heapify(near)
        seen = set[str]()
        while len(seen) < self._size:
            _, number, place = near[0]
            engine = self._round[number][1]
            heapreplace(near, (self._round[number + 1][0] - place, number + 1, place))
            if engine not in seen:
                seen.add(engine)
                yield engine


def _key(facts: RequestFacts) -> str:
    """Return the conversation with its model and salt, as neither models nor salts share caches."""
    return "\n".join((conversation_of(facts), facts.model, facts.scheduling.cache_salt or ""))


def _places(name: str) -> tuple[int, ...]:
    return unpack(f"<{PLACES}Q", _digest(name, 8 * PLACES))


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def work(load: int, read: float) -> float:
    """Return the work, in tokens, that a turn waits for at an engine with that many generations.

    ``read`` are the tokens that the engine has to read, and the home of the conversation does not.
    """
    return load * WORTH + read


def read_elsewhere(facts: RequestFacts, prompt_tokens: int) -> float:
    """Return the tokens of a prompt that an engine has to read because it is not the home of the conversation."""
    return prompt_tokens * (RETURNING if is_new(facts) else 1)
