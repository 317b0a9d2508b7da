"""StoredOwners: the words that hold for owners who signed in, so that what they left running keeps them.

No token is here: a row has the digest of an owner, and words such as those of an API key.  All servers of a store read
the rows before they take over what another server has left.
"""

from __future__ import annotations

import time

from penstock.services.store.database import NOW, Statement
from penstock.services.store.parts import StorePart
from penstock.services.store.writer import StoreContext

KEPT = 90 * 86_400
"""Seconds for which the words of an owner are kept that does not sign in again."""

RENEWED = 86_400.0
"""Seconds after which a row is written again, although its words are the same."""

_LATE = 60.0
"""Seconds by which a row may become visible after others that are newer."""

_TABLES = (
    """
    create table signed_in (
        owner text primary key,
        words text not null,
        seen_at double precision not null
    )
    """,
    "create index signed_in_seen on signed_in (seen_at)",
)

_REMEMBER = f"""
    insert into signed_in (owner, words, seen_at) values ($1, $2, {NOW})
    on conflict (owner) do update set words = excluded.words, seen_at = excluded.seen_at
"""

_SEEN = "select owner, words, seen_at from signed_in where seen_at >= $1 order by seen_at"

_FORGET = f"delete from signed_in where seen_at < {NOW} - {KEPT}"


class StoredOwners(StorePart):
    """The table of owners who signed in."""

    name = "signed_in"
    tables = _TABLES
    queued = (_REMEMBER,)

    def __init__(self, context: StoreContext) -> None:
        super().__init__(context)
        self._words: dict[str, str] = {}
        self._written: dict[str, float] = {}
        """The times, by the monotonic clock, at which this server has written an owner's words."""
        self._read_until = 0.0

    def words_of(self, owner: str) -> str | None:
        """Return the words that an owner had last; None if it has not signed in for long."""
        return self._words.get(owner)

    def remember(self, owner: str, words: str) -> None:
        """Keep the words of an owner; they are stored before anything that the owner's request stores."""
        now = time.monotonic()
        written = self._written.get(owner)
        if self._words.get(owner) != words or written is None or now - written > RENEWED:
            self._words[owner], self._written[owner] = words, now
            self.context.writer.queue((Statement(_REMEMBER, (owner, words)),), owner)

    async def recover(self) -> None:
        """Read what the servers of the store have written since."""
        for owner, words, seen_at in await self.context.read(_SEEN, self._read_until - _LATE):
            self._words[owner] = words
            self._read_until = max(self._read_until, seen_at)

    async def sweep(self) -> None:
        """Delete the words of owners who have not signed in for long."""
        await self.context.writer.carry_out((Statement(_FORGET, ()),))
