"""The container of a request: a named one that lives, that of the conversation, or a new one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.pipeline.errors import ContainerElsewhere, ContainerNotFound, InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.items import CodeInterpreterCall, Item, ShellCall
from penstock.pipeline.protocol.tools import ContainerUse
from penstock.services.container_wishes import ContainerWish
from penstock.services.containers import Described, MemoryLimit, Recorded
from penstock.stages.normalize.containers import MOST_EARLIER, ContainerFinder, earlier_containers
from tests.support.requests import normalize


@dataclass(frozen=True)
class Live:
    described: Described


@dataclass
class Known:
    """The containers of this server, of the store, and files; each by its id."""

    here: dict[str, MemoryLimit | None] = field(default_factory=dict)
    there: dict[str, MemoryLimit | None] = field(default_factory=dict)
    memory: MemoryLimit = "4g"

    async def has_file(self, file_id: str, owner: str) -> bool:
        return file_id == "file-1"

    def get(self, container_id: str, owner: str) -> Live | None:
        return Live(described(container_id, self.here[container_id])) if container_id in self.here else None

    async def elsewhere(self, ids: list[str], owner: str) -> dict[str, Recorded]:
        known = {name: Recorded(described(name, limit), "other", "http://other") for name, limit in self.there.items()}
        return {name: each for name, each in known.items() if name in ids}


def described(container_id: str, limit: MemoryLimit | None) -> Described:
    return Described(container_id, "", "", 0.0, 0.0, 60.0, limit)


async def use(known: Known, wish: ContainerWish, *earlier: str, moves: bool = False) -> ContainerUse:
    finder = ContainerFinder(known, known, "", moves)  # type: ignore[arg-type]
    return (await finder.uses({"python": wish}, earlier, "cntr_new"))["python"]


AUTO = ContainerWish(path="tools[0].container")


async def test_auto_takes_the_latest_container_that_lives() -> None:
    known = Known({"cntr_2": None, "cntr_3": None})
    assert await use(known, AUTO, "cntr_1", "cntr_2", "cntr_3") == ContainerUse("cntr_2")
    assert await use(known, AUTO, "cntr_1") == ContainerUse("cntr_new")
    assert await use(known, AUTO) == ContainerUse("cntr_new")


async def test_auto_moves_to_the_server_of_its_container() -> None:
    known = Known(there={"cntr_1": None})
    with pytest.raises(ContainerElsewhere) as caught:
        await use(known, AUTO, "cntr_1", moves=True)
    assert caught.value.url == "http://other"
    assert await use(known, AUTO, "cntr_1") == ContainerUse("cntr_new")


async def test_auto_with_another_memory_limit_makes_a_new_one() -> None:
    wish = ContainerWish(path="tools[0].container", memory_limit="1g")
    known = Known({"cntr_1": None, "cntr_2": "1g"})
    assert await use(known, wish, "cntr_1") == ContainerUse("cntr_new", memory_limit="1g")
    assert await use(known, wish, "cntr_1", "cntr_2") == ContainerUse("cntr_2", memory_limit="1g")
    assert await use(known, AUTO, "cntr_2") == ContainerUse("cntr_2", memory_limit="1g")


async def test_named_container_has_to_live() -> None:
    known = Known({"cntr_1": "1g"}, {"cntr_2": None})
    assert await use(known, ContainerWish(path="a", id="cntr_1")) == ContainerUse("cntr_1", is_own=False)
    with pytest.raises(ContainerElsewhere) as moved:
        await use(known, ContainerWish(path="a", id="cntr_2"))
    assert (moved.value.status, moved.value.param) == (409, "a")
    for name in ("cntr_3", "cntr_4"):
        with pytest.raises(ContainerNotFound) as caught:
            await use(known, ContainerWish(path="a", id=name))
        assert (caught.value.status, caught.value.param) == (404, "a")


async def test_too_much_memory_and_unknown_files_are_refused() -> None:
    with pytest.raises(UnsupportedParameter, match="--container-memory") as caught:
        await use(Known(), ContainerWish(path="a", memory_limit="16g"))
    assert caught.value.param == "a.memory_limit"
    assert await use(Known(), ContainerWish(path="a", file_ids=("file-1",))) == ContainerUse(
        "cntr_new", file_ids=("file-1",)
    )
    with pytest.raises(InvalidRequest, match="No such File") as missing:
        await use(Known(), ContainerWish(path="a", file_ids=("file-1", "file-2")))
    assert (missing.value.status, missing.value.param) == (404, "a.file_ids[1]")


def test_earlier_containers_are_the_latest_first_and_each_once() -> None:
    def code(container_id: str) -> Item:
        return CodeInterpreterCall("ci_1", "1", container_id, "completed")

    def shell(environment: dict[str, Any] | None) -> Item:
        return ShellCall("sh_1", "call_1", {"commands": []}, "completed", environment)

    items = [
        *(code("cntr_1"), code("cntr_2"), code("")),
        *(shell({"type": "container_reference", "container_id": "cntr_3"}), shell({"type": "local"}), shell(None)),
        *(shell({"type": "container_reference"}), shell({"container_id": 5}), code("cntr_1")),
    ]
    assert earlier_containers(items) == ("cntr_1", "cntr_3", "cntr_2")
    assert len(earlier_containers([code(f"cntr_{n}") for n in range(50)])) == MOST_EARLIER


async def test_different_containers_of_one_tool_are_refused(store: Any) -> None:
    tools = [{"type": "code_interpreter", "container": name} for name in ("cntr_1", "cntr_2")]
    with pytest.raises(InvalidRequest, match="different options") as caught:
        await normalize(store, input="Hi", tools=tools, hosted=frozenset({"python"}))
    assert caught.value.param == "tools[1].container"
