"""The containers of a request: those that it names, and those of its conversation.

As at OpenAI, an ``auto`` container is the one of the latest call in the conversation that is still alive, or else a new
one.  A container that the request names must be alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.pipeline.errors import ContainerElsewhere, ContainerNotFound, StoredFileNotFound, UnsupportedParameter
from penstock.pipeline.protocol.items import CodeInterpreterCall, Item, ShellCall
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.tools import ContainerUse
from penstock.services.container_wishes import ContainerWish
from penstock.services.containers import MEMORY, Containers, MemoryLimit, Recorded
from penstock.services.store.store import Store

MOST_EARLIER = 16
"""Containers of a conversation that may be the one of its next call."""


def earlier_containers(items: Sequence[Item]) -> tuple[str, ...]:
    """Return the containers of the calls among ``items``, the latest first."""
    found = dict[str, None]()
    for item in reversed(items):
        match item:
            case CodeInterpreterCall(container_id=str(container_id)) if container_id:
                found[container_id] = None
            case ShellCall(environment={"container_id": str(container_id)}):
                found[container_id] = None
            case _:
                continue
        if len(found) == MOST_EARLIER:
            break
    return tuple(found)


@dataclass(frozen=True)
class ContainerFinder:
    """Finds the containers of the requests of one owner; ``moves`` is True if another server may run the response."""

    containers: Containers
    store: Store
    owner: str
    moves: bool

    async def uses(
        self, wishes: Mapping[str, ContainerWish], earlier: Sequence[str], new_id: str
    ) -> Mapping[str, ContainerUse]:
        """Return the containers of the built-in tools, by namespace.

        Raises `ContainerNotFound` for one that is named and not alive, and `ContainerElsewhere` if another server has
        it.
        """
        named = [wish.id for wish in wishes.values() if wish.id is not None]
        automatic = earlier if len(named) < len(wishes) else ()
        recorded = await self._recorded([*named, *automatic])
        return {kind: await self._use(wish, automatic, recorded, new_id) for kind, wish in wishes.items()}

    async def _recorded(self, ids: Iterable[str]) -> Mapping[str, Recorded]:
        """Return the living containers among ``ids`` that other servers have."""
        unknown = [name for name in dict.fromkeys(ids) if not self.containers.get(name, self.owner)]
        return await self.containers.elsewhere(unknown, self.owner) if unknown else {}

    async def _use(
        self, wish: ContainerWish, earlier: Sequence[str], recorded: Mapping[str, Recorded], new_id: str
    ) -> ContainerUse:
        if wish.id is not None:
            if self.containers.get(wish.id, self.owner):
                return ContainerUse(wish.id, is_own=False)
            if wish.id in recorded:
                raise ContainerElsewhere(shortened(wish.id), recorded[wish.id].url, param=wish.path)
            raise ContainerNotFound(shortened(wish.id), param=wish.path)
        check_memory(wish.memory_limit, self.containers, f"{wish.path}.memory_limit")
        for position, file_id in enumerate(wish.file_ids):
            if not await self.store.has_file(file_id, self.owner):
                raise StoredFileNotFound(shortened(file_id), param=f"{wish.path}.file_ids[{position}]")
        for name in earlier:
            here, there = self.containers.get(name, self.owner), recorded.get(name)
            known = here.described if here else there.described if there else None
            if known is None or wish.memory_limit not in (None, known.memory_limit):
                continue
            if here:
                return ContainerUse(name, True, known.memory_limit, wish.file_ids)
            if there and self.moves:
                raise ContainerElsewhere(name, there.url, param=wish.path)
        return ContainerUse(new_id, True, wish.memory_limit, wish.file_ids)


def check_memory(wanted: MemoryLimit | None, containers: Containers, param: str) -> None:
    """Raise `UnsupportedParameter` for a larger limit of memory than containers may have here."""
    if wanted is not None and MEMORY[wanted] > MEMORY[containers.memory]:
        message = f"A container may have {containers.memory} of memory here: its operator sets --container-memory."
        raise UnsupportedParameter(message, param=param)
