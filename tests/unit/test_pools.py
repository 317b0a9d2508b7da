"""The pools that clients share: each stands in a table of `docs/LIMITS.md`, and no key can take all of it."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from penstock.api.http.held_bytes import MOST_AT_ONCE, MOST_SMALL_BYTES, SMALL, HeldBytes
from penstock.api.limits.admission import Admission
from penstock.api.open_sockets import Latest, OpenSockets
from penstock.api.runs.background import BackgroundQueue, InFlight
from penstock.api.runs.scheduler import Scheduler
from penstock.api.start.share import ALONE
from penstock.extensions.batches.runner import BatchRunner
from penstock.extensions.batches.works import Works
from penstock.extensions.tools.browser.reader import Reader
from penstock.extensions.tools.files.file_reader import FileReader
from penstock.extensions.tools.resources.files import Files
from penstock.pipeline.errors import EngineOverloaded, ServerBusy
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.items import FunctionCall
from penstock.services.engines import image_decoding
from penstock.services.recent_calls import RecentCalls
from penstock.services.runs.run import RunRegistry
from penstock.services.slots import Slots, sandbox_slots
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.webhooks import Webhooks
from penstock.stages.optional.admit import Places
from tests.support.paths import PRODUCT, ROOT

MAKERS = {
    *("Slots", "SharedSlots", "Pool", "LruCache"),
    *("Semaphore", "BoundedSemaphore", "ThreadPoolExecutor", "ProcessPoolExecutor"),
    *("ClientSession", "TCPConnector", "guarded_connector"),
}
"""The names of all that makes a pool: places, bytes, caches, threads and connections."""

COMMANDS = ("api/cli", "extensions/workbench", "extensions/batches/command", "testing", "docs", "tests")
"""Folders of commands, which serve one user."""

ROW = re.compile(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \| (`[^|]+`) \|$", re.MULTILINE)
TABLE = (ROOT / "docs" / "LIMITS.md").read_text().split("## What keys share")[1].split("\n## ")[0]
ROWS = {place: share for share, places in ROW.findall(TABLE) for place in re.findall(r"`([^`]+)`", places)}

A, B = "key a", "key b"


def _calls(node: ast.AST, path: str) -> Iterator[str]:
    """Yield the path of each function, class or module in which a pool is made."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            name = getattr(child.func, "attr", getattr(child.func, "id", ""))
            if name in MAKERS:
                yield path
        inner = (
            f"{path}.{child.name}" if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else path
        )
        yield from _calls(child, inner)


def pools_of(file: Path) -> set[str]:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return set(_calls(ast.parse(file.read_text()), module))


def test_table_has_each_pool_of_the_product() -> None:
    """A new pool needs a row, with the share of a key."""
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")]
    served = [file for file in files if not str(file.relative_to(ROOT)).startswith(COMMANDS)]
    assert set(ROWS) == set().union(*map(pools_of, served))


def taken(slots: Slots, owner: str) -> int:
    """Take all places that an owner can have, and return their number."""
    count = 0
    while slots.acquire_now(owner):
        count += 1
    return count


def leaves_places(*pools: Slots) -> None:
    for slots in pools:
        held = taken(slots, A)
        assert 0 < held < slots.limit
        assert slots.acquire_now(B)
        slots.release(B)
        for _ in range(held):
            slots.release(A)


def gives_the_next_place(slots: Slots) -> None:
    """One key may take all places, and the next free one is another key's, who has waited for less time."""
    assert taken(slots, A) == slots.limit
    begun: list[str] = []
    slots.request(A, "more of a", lambda: begun.append(A))
    slots.request(B, "first of b", lambda: begun.append(B))
    slots.release(A)
    assert begun == [B]


def leaves_places_in_the_queue() -> None:
    gives_the_next_place(Slots(2))
    store = Store(NullDatabase())
    slots = Slots(1)
    queue = BackgroundQueue(_never, _never, RunRegistry(store), store, InFlight(), slots, longest=100)
    taken(slots, A)
    with pytest.raises(EngineOverloaded):
        for number in range(100):
            queue.check(A)
            slots.request(A, number, lambda: None)
    queue.check(B)


def leaves_places_in_the_engine(slots: Slots) -> None:
    gives_the_next_place(slots)
    places = Places(slots, most=slots.limit + 4)
    while not places.is_full(A):
        slots.request(A, object(), lambda: None)
    assert not places.is_full(B)


async def _never(_: object) -> Any:
    raise AssertionError


def leaves_room_for_bodies() -> None:
    held = HeldBytes()
    with pytest.raises(ServerBusy):
        for _ in range(MOST_AT_ONCE):
            held.body(4 * SMALL, lambda: None, A).take(4 * SMALL)
    held.body(4 * SMALL, lambda: None, B).take(4 * SMALL)
    with pytest.raises(ServerBusy):
        for _ in range(MOST_SMALL_BYTES // SMALL):
            held.message(SMALL, lambda: None, A).take(SMALL)
    held.message(SMALL, lambda: None, B).take(SMALL)


def forgets_own_histories() -> None:
    remembered = OpenSockets().remembered
    latest, size = Latest("resp_1", History(()), 1), 2**26
    remembered.put("of b", latest, size, B)
    for number in range(100):
        remembered.put(f"of a {number}", latest, size, A)
    assert remembered.get("of b") is latest


def leaves_room_for_calls() -> None:
    calls = RecentCalls()
    call = FunctionCall("fc_b", "call_b", "look", "{}", "completed")
    calls.keep((call,), B, "tiny", {"fc_b": (1,)})
    tokens = (1,) * 2**20
    for number in range(100):
        calls.keep((replace(call, call_id=f"call_{number}", id="fc_a"),), A, "tiny", {"fc_a": tokens})
    assert asyncio.run(calls.restored([call], B, lambda _: True)) == ((call,), {"fc_b": (1,)})


def leaves_places_to_lines() -> None:
    scheduler = cast("Scheduler", SimpleNamespace(store=Store(NullDatabase()), admission=Admission()))
    runner = BatchRunner(scheduler, _never, room=lambda _: 2, validate=_never, output_line=_no_line)
    runner.places.limit = 2
    gives_the_next_place(runner.places)


def _no_line(*_: object) -> bytes:
    raise AssertionError


HOLDS: dict[str, Callable[[], None]] = {
    "api.http.held_bytes.HeldBytes.__post_init__": leaves_room_for_bodies,
    "api.open_sockets.OpenSockets": forgets_own_histories,
    "services.recent_calls.RecentCalls.__init__": leaves_room_for_calls,
    "extensions.tools.resources.files.Files": lambda: leaves_places(
        Files(Store(NullDatabase()), Admission(), 1).places
    ),
    "api.runs.scheduler.Scheduler.__post_init__": leaves_places_in_the_queue,
    "api.start.share.Share.slots": lambda: leaves_places_in_the_engine(ALONE.slots(4, lambda _: 1.0)),
    "extensions.batches.runner.BatchRunner.__post_init__": leaves_places_to_lines,
    "extensions.batches.works.Works.__post_init__": lambda: gives_the_next_place(
        Works(Store(NullDatabase()), _never, _no_line, lambda: None).places
    ),
    "extensions.batches.yielding.Yielding._of_lines": lambda: gives_the_next_place(Slots(2)),
    "extensions.tools.browser.reader.Reader.__init__": lambda: leaves_places(Reader().brief, Reader().long),
    "services.engines.image_decoding": lambda: leaves_places(image_decoding.places),
    "extensions.tools.files.file_reader.FileReader.__init__": lambda: leaves_places(FileReader().places),
    "services.slots.sandbox_slots": lambda: leaves_places(sandbox_slots()),
    "services.webhooks.Webhooks": lambda: leaves_places(
        Webhooks(Store(NullDatabase()).webhooks, lambda _: None).places
    ),
}
"""Pools that a key could fill, each with a check that it cannot."""


@pytest.mark.parametrize("place", [place for place, share in ROWS.items() if share != "none"])
def test_key_that_takes_its_share_stops_no_other_key(place: str) -> None:
    HOLDS[place]()


def test_each_check_has_a_row() -> None:
    assert HOLDS.keys() <= ROWS.keys()
