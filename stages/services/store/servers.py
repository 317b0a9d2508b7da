"""Servers: the penstock processes that share one store, and which of them are alive.

The clock is the database's, so that no two servers disagree about the time.
"""

from __future__ import annotations

import socket
from pathlib import Path

from penstock.stages.services.store.database import NOW, Statement
from penstock.stages.services.store.ledger import Ledger
from penstock.stages.services.store.stored import Server

STALE = 15.0
"""Seconds without a beat after which a server is dead."""

_BEAT = f"""
    insert into servers (id, url, machine, beat_at) values ($1, $2, $3, {NOW})
    on conflict (id) do update set url = excluded.url, beat_at = excluded.beat_at
"""

_GO_ON = f"""
    update servers set beat_at = {NOW} where id = $1 and beat_at >= {NOW} - cast($2 as double precision)
"""
"""Counts a server whose last beat was not long ago."""

_REPLACE = "delete from servers where url = $2 and machine = $3 and id <> $1"

_LEAVE = "delete from servers where id = $1"

_RUNNER = f"""
    select responses.server_id, servers.url, beat_at >= {NOW} - cast($2 as double precision)
    from responses left join servers on servers.id = responses.server_id
    where responses.id = $1 and ended_at is null and responses.server_id is not null
"""


class Servers:
    """This server among the others."""

    def __init__(self, ledger: Ledger) -> None:
        self.machine = _this_machine()
        """Where this server runs: an address such as 127.0.0.1 is another one on each machine."""
        self._ledger = ledger
        self._url = ""

    async def join(self, url: str) -> None:
        """Be found by the others under that address; who had it before on this machine is dead, as it is taken now."""
        self._url = url
        await self._ledger.writer.carry_out((Statement(_BEAT, self._here), Statement(_REPLACE, self._here)))

    async def beat(self) -> bool:
        """Be alive; `StoreFailed` if the store does not learn of it.

        Says whether the beat before was at most half of what makes a server dead ago, by the store's clock.
        """
        lately = (self._ledger.server_id, self._ledger.stale / 2)
        beat = (Statement(_GO_ON, lately), Statement(_BEAT, self._here))
        counts = await self._ledger.writer.carry_out(
            beat, is_first=True
        )  # silence behind a long queue looks like death
        return counts[0] > 0

    async def leave(self) -> None:
        """Be gone: what this server has not ended is an orphan from now on."""
        own = self._ledger.server_id
        await self._ledger.writer.carry_out((Statement(_LEAVE, (own,)),), own)

    async def runner(self, response_id: str) -> Server | None:
        """Who runs a response; None if it has ended, or waits for anybody."""
        own = self._ledger.server_id
        for server_id, url, is_alive in await self._ledger.read(_RUNNER, response_id, self._ledger.stale):
            return Server(server_id, url or "", bool(is_alive) or server_id == own)
        return None

    @property
    def _here(self) -> tuple[str, str, str]:
        return self._ledger.server_id, self._url, self.machine


def _this_machine() -> str:
    """The name of this machine since it was started; each container with a network of its own counts as one."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # not every system tells
        return socket.gethostname()
