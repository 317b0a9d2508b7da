"""The conversations that a server knows, and what each event among them says of those in the engine's cache.

Nothing here does I/O: the caller says what has happened and when, and passes the hints on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.extensions.hints.waits import CHILD, CLIENT, LONGEST, Waits
from penstock.services.engines.engine import CacheHint

MOST_TALKS = 100_000
"""Conversations that are known at once, of some 500 bytes each."""


@dataclass(eq=False, slots=True)
class Talk:
    """A conversation: one of a client, or the main one or a child of an agent's session."""

    key: str
    session: str
    """The agent's session; empty if the client names none."""
    parent: Talk | None = None
    """The conversation that waited for a call when this one began in its session."""
    response_id: str = ""
    tokens: int = 0
    """Tokens of the latest prompt and its answer."""
    what: str = CLIENT
    """What it waits for."""
    since: float | None = None
    """The time of its latest answer; None while the engine works for it."""
    children: list[Talk] = field(default_factory=list)

    @property
    def calls(self) -> bool:
        """True if it waits for the output of a call."""
        return self.since is not None and self.what not in (CLIENT, CHILD)


@dataclass
class Talks:
    """All conversations, those that have waited longest first."""

    waits: Waits = field(default_factory=Waits)
    _talks: OrderedDict[str, Talk] = field(default_factory=OrderedDict)
    _sessions: dict[str, OrderedDict[str, Talk]] = field(default_factory=dict)

    def asked(self, key: str, session: str, prompt: int, now: float) -> Iterator[CacheHint]:
        """A conversation sends its next prompt, of so many tokens."""
        yield from self._forget_old(now)
        talk = self._talks.get(key)
        if talk is None:
            self._begin(key, session)
            return
        if talk.since is not None:
            self.waits.note(talk.what, now - talk.since)
            talk.since = None
            if prompt < talk.tokens:  # its client, or the server, has compacted it
                yield CacheHint("let_go", talk.key, talk.response_id, talk.tokens)
        for child in talk.children:
            if child.since is not None and not child.calls:
                yield from self.over(child.key)
        talk.children = [child for child in talk.children if child.key in self._talks]

    def answered(
        self, key: str, response_id: str, calls: tuple[str, ...], tokens: int, now: float
    ) -> Iterator[CacheHint]:
        """The engine has answered with these calls; ``tokens`` are those of the prompt and the answer."""
        talk = self._talks.get(key) or self._begin(key, "")
        self._talks.move_to_end(key)
        talk.what = self.waits.longest(calls) if calls else CHILD if talk.parent else CLIENT
        talk.response_id, talk.tokens, talk.since = response_id, tokens, now
        outlook = self.waits.outlook(talk.what)
        yield CacheHint("keep", key, response_id, tokens, share=outlook.share, seconds=outlook.seconds)
        parent = talk.parent
        if not calls and parent and parent.calls and not any(_is_busy(child) for child in parent.children):
            yield CacheHint("fetch", parent.key, parent.response_id, parent.tokens)

    def over(self, key: str) -> Iterator[CacheHint]:
        """A conversation will not go on: it was deleted, or its response cancelled."""
        talk = self._talks.get(key)
        if talk is not None:
            self._drop(talk)
            yield CacheHint("let_go", key, talk.response_id, talk.tokens)

    def _begin(self, key: str, session: str) -> Talk:
        siblings = self._sessions.setdefault(session, OrderedDict()) if session else {}
        parent = next((each for each in reversed(siblings.values()) if each.calls), None)
        talk = self._talks[key] = Talk(key, session, parent)
        if parent:
            parent.children.append(talk)
        if session:
            siblings[key] = talk
        if len(self._talks) > MOST_TALKS:
            self._drop(next(iter(self._talks.values())))
        return talk

    def _forget_old(self, now: float) -> Iterator[CacheHint]:
        """Forget conversations that have not come back in the longest time that counts."""
        while self._talks:
            talk = next(iter(self._talks.values()))
            if talk.since is None or now - talk.since < LONGEST:
                return
            self._drop(talk)
            yield CacheHint("let_go", talk.key, talk.response_id, talk.tokens)

    def _drop(self, talk: Talk) -> None:
        del self._talks[talk.key]
        if talk.since is not None:
            self.waits.note(talk.what, float("inf"))
        if talk.session:
            siblings = self._sessions[talk.session]
            siblings.pop(talk.key, None)
            if not siblings:
                del self._sessions[talk.session]


def _is_busy(talk: Talk) -> bool:
    return talk.since is None or talk.calls
