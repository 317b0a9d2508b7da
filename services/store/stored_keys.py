"""StoredKeys: the API keys that the servers of a store share.

A row has the digest of a key, and the words of its line in a key file.
"""

from __future__ import annotations

import time

from penstock.services.store.database import Statement
from penstock.services.store.writer import StoreContext

_ALL = "select digest, words from api_keys order by made_at, digest"

_ADD = "insert into api_keys (digest, words, made_at) values ($1, $2, $3)"

_REVOKE = "delete from api_keys where digest = $1"


class StoredKeys:
    """The table of API keys."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    async def all(self) -> tuple[tuple[str, str], ...]:
        """Return the digest and the words of each key, oldest first; raises `StoreFailed` if that is impossible."""
        return tuple((digest, words) for digest, words in await self.context.read(_ALL))

    async def add(self, digest: str, words: str) -> None:
        """Add a key; raises `StoreFailed` if it cannot be stored."""
        await self.context.writer.carry_out([Statement(_ADD, (digest, words, time.time()))])

    async def revoke(self, digest: str) -> None:
        """Delete a key; raises `StoreFailed` if that cannot be stored."""
        await self.context.writer.carry_out([Statement(_REVOKE, (digest,))])
