"""Servers: the penstock processes that share one store, and their heartbeats.

All times are by the database's clock, so that the servers agree on them.
"""

from __future__ import annotations

import socket
from pathlib import Path

from penstock.services.store.database import NOW, Statement
from penstock.services.store.stored import Server
from penstock.services.store.writer import StoreContext

STALE = 15.0
"""Seconds without a heartbeat after which a server is dead."""


def of_dead_server(table: str) -> str:
    """Return the condition that no living server has the id in ``server_id`` of a row.

    ``$1`` is the id of this server, and ``$2`` its `STALE`.  If this server looks dead as well, the clock has jumped,
    and the others may be alive.
    """
    return f"""
        not exists (
            select 1 from servers
            where servers.id = {table}.server_id and beat_at >= {NOW} - cast($2 as double precision)
        ) and not exists (
            select 1 from servers where servers.id = $1 and beat_at < {NOW} - cast($2 as double precision)
        )
    """


_BEAT = f"""
    insert into servers (id, url, machine, beat_at) values ($1, $2, $3, {NOW})
    on conflict (id) do update set url = excluded.url, beat_at = excluded.beat_at
"""

_GO_ON = f"""
    update servers set beat_at = {NOW} where id = $1 and beat_at >= {NOW} - cast($2 as double precision)
"""
"""Changes a row only if this server's last heartbeat was recent."""

_REPLACE = "delete from servers where url = $2 and machine = $3 and id <> $1"

_LEAVE = "delete from servers where id = $1"

_RUNNER = f"""
    select responses.server_id, servers.url, beat_at >= {NOW} - cast($2 as double precision)
    from responses left join servers on servers.id = responses.server_id
    where responses.id = $1 and ended_at is null and responses.server_id is not null
"""


class Servers:
    """This server's entry in the store, and the entries of the others."""

    def __init__(self, context: StoreContext) -> None:
        self.machine = _this_machine()
        """This server's machine: an address such as 127.0.0.1 means a different server on each machine."""
        self.context = context
        self._url = ""

    async def join(self, url: str) -> None:
        """Register this server's address for the others, with a first heartbeat.

        Another server with this address and machine is removed: it must be dead, because the address was free.
        """
        self._url = url
        await self.context.writer.carry_out((Statement(_BEAT, self._here), Statement(_REPLACE, self._here)))

    async def go_on(self) -> bool:
        """Record a heartbeat if the previous one was at most half of ``stale`` seconds ago, by the database's clock.

        Return False if it was not; raise `StoreFailed` if the store cannot be reached.
        """
        lately = (self.context.server_id, self.context.stale / 2)
        # first: if a heartbeat had to wait for a long queue, this server would look dead
        (count,) = await self.context.writer.carry_out((Statement(_GO_ON, lately),), is_first=True)
        return count > 0

    async def beat(self) -> None:
        """Record a heartbeat, however long this server was silent; raise `StoreFailed` if it cannot be stored."""
        await self.context.writer.carry_out((Statement(_BEAT, self._here),), is_first=True)

    async def leave(self) -> None:
        """Remove this server's entry.  Its unfinished responses become orphans."""
        own = self.context.server_id
        await self.context.writer.carry_out((Statement(_LEAVE, (own,)),), own)

    async def declare_dead(self, url: str) -> None:
        """Remove the server of this machine that had an address.  Its unfinished responses become orphans."""
        own = self.context.server_id
        await self.context.writer.carry_out((Statement(_REPLACE, (own, url, self.machine)),))

    async def runner(self, response_id: str) -> Server | None:
        """Return the server that runs a response; None if the response has ended, or waits for any server."""
        own = self.context.server_id
        for server_id, url, is_alive in await self.context.read(_RUNNER, response_id, self.context.stale):
            return Server(server_id, url or "", bool(is_alive) or server_id == own)
        return None

    @property
    def _here(self) -> tuple[str, str, str]:
        return self.context.server_id, self._url, self.machine


def _this_machine() -> str:
    """Return an id of this machine since its boot; each container with its own network counts as a machine."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"
    except OSError:  # these files exist on Linux only
        return socket.gethostname()
