"""The containers of all servers of the store: which server has each, and when it was used.

The row of a container stays for a day after its end, so that its owner learns that it has expired.  A container whose
server is dead has ended with it, whatever its row says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, cast

import msgspec

from penstock.services.containers import Described, MemoryLimit, Recorded
from penstock.services.store import rows
from penstock.services.store.database import NOW, Row, Statement, placeholders
from penstock.services.store.parts import StorePart

KEPT: Final = 86_400.0
"""Seconds for which the row of a container stays after its end."""

_TABLES = (
    """
    create table containers (
        id text primary key,
        owner text not null,
        server_id text not null,
        name text not null,
        created_at double precision not null,
        last_active_at double precision not null,
        ttl double precision not null,
        memory_limit text,
        ended_at double precision
    )
    """,
    "create index containers_of_owner on containers (owner, created_at)",
)
"""The containers of all servers, and which server has each."""

_TEXT = msgspec.json.Decoder(str)

_COLUMNS = f"""
    containers.id, containers.owner, name, created_at, last_active_at, ttl, memory_limit, ended_at, server_id,
    url, coalesce(beat_at >= {NOW} - cast($1 as double precision), 1 = 0)
    from containers left join servers on servers.id = server_id
"""

_ADD = """
    insert into containers (id, owner, server_id, name, created_at, last_active_at, ttl, memory_limit)
    values ($1, $2, $3, $4, $5, $6, $7, $8) on conflict (id) do update set
        server_id = excluded.server_id, name = excluded.name,
        created_at = excluded.created_at, last_active_at = excluded.last_active_at,
        ttl = excluded.ttl, memory_limit = excluded.memory_limit, ended_at = null
    where containers.owner = excluded.owner
"""

_TOUCH = "update containers set last_active_at = $3 where id = $1 and server_id = $2"

_END = "update containers set ended_at = last_active_at where id = $1 and server_id = $2 and ended_at is null"

_DELETE = "delete from containers where id = $1 and owner = $2"

_SWEEP = f"""
    delete from containers where last_active_at < $1 and (
        ended_at is not null or not exists (
            select 1 from servers where servers.id = server_id and beat_at >= {NOW} - cast($2 as double precision)
        )
    )
"""


class StoredContainers(StorePart):
    """The containers of all owners."""

    name = "containers"
    tables = _TABLES

    async def add(self, described: Described) -> None:
        """Record a container of this server, which may replace one that has ended."""
        one = described
        row = (
            one.id,
            one.owner,
            self.context.server_id,
            rows.to_json(one.name),
            one.created_at,
            one.last_active_at,
            one.ttl,
        )
        await self.context.writer.carry_out([Statement(_ADD, (*row, one.memory_limit))])

    async def touch(self, container_id: str, at: float) -> None:
        """Record that a container of this server was used."""
        await self.context.writer.carry_out([Statement(_TOUCH, (container_id, self.context.server_id, at))])

    async def end(self, container_id: str) -> None:
        """Record that a container of this server has ended."""
        await self.context.writer.carry_out([Statement(_END, (container_id, self.context.server_id))])

    async def forget(self, container_id: str, owner: str) -> bool:
        """Delete the row of a container; False if there is none."""
        if not rows.can_exist(container_id):
            return False
        return (await self.context.writer.carry_out([Statement(_DELETE, (container_id, owner))]))[0] > 0

    async def find(self, container_ids: Sequence[str], owner: str) -> dict[str, Recorded]:
        """Return the containers of an owner with these ids, by id."""
        known = [name for name in container_ids if rows.can_exist(name)]
        if not known:
            return {}
        where = f"where containers.owner = $2 and containers.id in ({placeholders(len(known), 3)})"
        found = await self.context.read(f"select {_COLUMNS} {where}", self.context.stale, owner, *known)
        return {row[0]: self._recorded(row) for row in found}

    async def elsewhere(self, container_ids: Sequence[str], owner: str) -> dict[str, Recorded]:
        """Return the living containers of an owner with these ids that other servers have, by id."""
        found, own = await self.find(container_ids, owner), self.context.server_id
        return {name: each for name, each in found.items() if each.described.is_live and each.server_id != own}

    async def of(self, owner: str, most: int) -> list[Recorded]:
        """Return the containers of an owner, the newest first, at most so many."""
        where = f"where containers.owner = $2 order by created_at desc, containers.id limit {int(most)}"
        found = await self.context.read(f"select {_COLUMNS} {where}", self.context.stale, owner)
        return [self._recorded(row) for row in found]

    async def sweep(self) -> None:
        """Delete the rows of containers that ended long ago."""
        await self.context.writer.carry_out([Statement(_SWEEP, (time.time() - KEPT, self.context.stale))])

    def _recorded(self, row: Row) -> Recorded:
        container_id, owner, name, created, active, ttl, memory, ended_at, server_id, url, is_alive = row
        is_live = ended_at is None and (bool(is_alive) or server_id == self.context.server_id)
        limit = cast("MemoryLimit | None", memory)
        described = Described(
            container_id,
            owner=owner,
            name=rows.from_json(name, _TEXT),
            created_at=created,
            last_active_at=active,
            ttl=ttl,
            memory_limit=limit,
            is_live=is_live,
        )
        return Recorded(described, server_id, url or "")
