"""The conversations that a server knows, and what each event among them says of those in the engine's cache.

Nothing here does I/O: the caller says what has happened and when, and passes the hints on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.extensions.hints.waits import CANCELLED, CHILD, CLIENT, LONGEST, AllWaits, Waits
from penstock.services.engines.engine import CacheHint

MOST_TALKS = 100_000
"""Conversations that are known at once, of some 500 bytes each."""

COMPACTED = 0.5
"""Share of the last turn's tokens below which a prompt begins the conversation anew: thoughts that a model drops from
it are fewer.
"""


FORGOTTEN_AT_ONCE = 100
"""Conversations that are let go before a turn at most, as each takes some time."""

LEAST_SHARE = 0.2
"""Probability to come back below which a conversation is let go at once, as are children that have answered."""


class Asker(NamedTuple):
    """The client of a conversation."""

    owner: str = ""
    """Its API key."""
    model: str = ""
    """The name of the model that it asks, as the engine serves it."""


NO_ASKER = Asker()


@dataclass(eq=False, slots=True)
class Talk:
    """A conversation: one of a client, or the main one or a child of an agent's session."""

    key: str
    session: str
    """The agent's session; empty if the client names none."""
    parent: Talk | None
    """The conversation that waited for a call when this one began in its session."""
    at: float
    """The time of its latest event."""
    asker: Asker
    names: tuple[str, ...] = ()
    """The ids of its latest response, and of what keeps its items."""
    response_id: str = ""
    """The response that the engine has answered last."""
    tokens: int = 0
    """Tokens of the latest prompt, and of its answer once there is one."""
    what: str | None = None
    """The name of its wait; None while the engine works for it."""
    children: set[Talk] = field(default_factory=set)
    """The children that are not done."""
    is_shared: bool = False
    """True if several conversations have this name: then none of them is known to be over."""

    @property
    def has_calls(self) -> bool:
        """True if it waits for the output of a call."""
        return self.what not in (None, CLIENT, CHILD, CANCELLED)

    @property
    def is_done(self) -> bool:
        """True if it waits for no call, and the engine does not work for it."""
        return self.what in (CLIENT, CHILD, CANCELLED)


@dataclass
class Talks:
    """All conversations, those without an event for the longest time first."""

    _waits: AllWaits = field(default_factory=AllWaits)
    _talks: OrderedDict[str, Talk] = field(default_factory=OrderedDict)
    _waiting: dict[str, dict[str, Talk]] = field(default_factory=dict)
    """Of each session, the conversations that wait for calls, those that began to wait last at the end."""
    _named: dict[str, Talk] = field(default_factory=dict)

    def named(self, name: str) -> Talk | None:
        """Return the conversation whose latest response, or whose place in the store, has this id."""
        return self._named.get(name)

    def share(self, key: str) -> None:
        """Note that a conversation begins: one of this name that is known is another."""
        if talk := self._talks.get(key):
            talk.is_shared = True

    def fork(self, key: str, previous: str | None) -> None:
        """Note that a turn follows the response ``previous``: unless that is the latest one, two branches go on."""
        talk = self._talks.get(key)
        if talk and previous and talk.what not in (None, CANCELLED) and previous != talk.response_id:
            talk.is_shared = True

    def waits(self, owner: str = "") -> Waits:
        """Return what is known of the waits of an API key."""
        return self._waits.of(owner)

    def asked(
        self,
        key: str,
        session: str,
        prompt: int,
        now: float,
        names: tuple[str, ...] = (),
        asker: Asker = NO_ASKER,
    ) -> Iterator[CacheHint]:
        """Yield what follows if a conversation sends its next prompt; ``names`` are those by which it is `named`."""
        yield from self._forget_old(now)
        talk = self._talks.get(key)
        if talk is None:
            talk = self._begin(key, session, now, asker)
        elif talk.what is None and not (names and names[0] in talk.names):
            talk.is_shared = True  # the engine works for another response
        self._talks.move_to_end(key)
        if talk.what is not None:
            self._end_wait(talk)
            self.waits(talk.asker.owner).note(talk.what, now - talk.at)
            is_shorter = prompt < COMPACTED * talk.tokens and not talk.is_shared
            yield CacheHint("let_go" if is_shorter else "fetch", key, talk.response_id, talk.tokens)
        self._name(talk, names)
        talk.asker, talk.tokens = asker, prompt
        talk.what, talk.at = None, now
        if talk.parent:
            talk.parent.children.add(talk)

    def answered(
        self,
        key: str,
        response_id: str,
        calls: tuple[str, ...],
        tokens: int,
        now: float,
        *,
        is_cancelled: bool = False,
    ) -> Iterator[CacheHint]:
        """Yield what follows if the engine has answered with these calls, by the names of their tools.

        ``tokens`` are those of the prompt and the answer.
        """
        talk = self._talks.get(key)
        if talk is None:
            return
        self._talks.move_to_end(key)
        others = CANCELLED if is_cancelled else CHILD if talk.parent else CLIENT
        self._end_wait(talk)
        waits = self.waits(talk.asker.owner)
        talk.what = waits.longest(calls) if calls and not is_cancelled else others
        if talk.session and talk.has_calls:
            self._waiting.setdefault(talk.session, {})[key] = talk
        talk.response_id, talk.tokens, talk.at = response_id, tokens, now
        outlook = waits.outlook(talk.what)
        keep = CacheHint("keep", key, response_id, tokens, share=outlook.share, seconds=outlook.seconds)
        is_over = outlook.share < LEAST_SHARE and not talk.is_shared
        yield CacheHint("let_go", key, response_id, tokens) if is_over else keep
        parent = talk.parent
        if parent and talk.is_done:
            parent.children.discard(talk)
        if talk.what == CHILD and parent and parent.has_calls and not parent.children:
            yield CacheHint("fetch", parent.key, parent.response_id, parent.tokens)

    def over(self, key: str) -> Iterator[CacheHint]:
        """Yield what follows if a conversation will not go on."""
        talk = self._talks.get(key)
        if talk is not None and not talk.is_shared:
            yield self._end(talk)

    def _end(self, talk: Talk) -> CacheHint:
        if talk.what is not None:
            self.waits(talk.asker.owner).note(talk.what, math.inf)
        self._drop(talk)
        return CacheHint("let_go", talk.key, talk.response_id, talk.tokens)

    def _name(self, talk: Talk, names: tuple[str, ...]) -> None:
        for name in talk.names:
            if self._named.get(name) is talk:
                del self._named[name]
        talk.names = names
        self._named.update(dict.fromkeys(names, talk))

    def _begin(self, key: str, session: str, now: float, asker: Asker) -> Talk:
        parent = next(reversed(self._waiting.get(session, {}).values()), None)
        talk = self._talks[key] = Talk(key, session, parent, at=now, asker=asker)
        if len(self._talks) > MOST_TALKS:
            self._drop(next(iter(self._talks.values())))
        return talk

    def _forget_old(self, now: float) -> Iterator[CacheHint]:
        """Let those go that have not come back in the longest time that counts."""
        for _ in range(FORGOTTEN_AT_ONCE):
            talk = next(iter(self._talks.values()), None)
            if talk is None or now - talk.at < LONGEST:
                return
            yield self._end(talk)

    def _drop(self, talk: Talk) -> None:
        del self._talks[talk.key]
        self._name(talk, ())
        self._end_wait(talk)
        talk.what = None
        if talk.parent:
            talk.parent.children.discard(talk)
            talk.parent = None  # else each conversation keeps all before it that are forgotten

    def _end_wait(self, talk: Talk) -> None:
        waiting = self._waiting.get(talk.session, {})
        if waiting.pop(talk.key, None) and not waiting:
            del self._waiting[talk.session]
