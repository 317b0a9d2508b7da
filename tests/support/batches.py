"""Batches in a store, and a server that runs their lines with an answer that the test gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.batches.batch import LineAnswer, LineResult, NewLine, StoredBatch, StoredLine
from penstock.extensions.batches.runner import BatchRunner, LineRequest
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.store import Store
from penstock.services.use import Use
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages, responses_pipeline
from tests.support.api_clients import wait_until

OWNER = "alice"

_numbers = count()


def batches_of(store: Store) -> StoredBatches:
    return store.part(StoredBatches)


def a_batch(**fields: Any) -> StoredBatch:
    now = time.time()
    usual: dict[str, Any] = {"id": f"batch_{next(_numbers):032x}", "owner": OWNER, "api": "openai"}
    usual |= {"endpoint": "/v1/chat/completions", "created_at": now, "expires_at": now + 3600}
    usual |= fields
    return StoredBatch(**usual)


def lines(number: int, **fields: Any) -> list[NewLine]:
    return [NewLine(each, f"line {each}", b'{"n": %d}' % each, **fields) for each in range(1, number + 1)]


async def begun(stored: StoredBatches, number: int = 3, **fields: Any) -> StoredBatch:
    """Store a batch whose lines wait."""
    batch = a_batch(**fields)
    await stored.create(batch)
    for first in range(0, number, 500):
        await stored.add_lines(batch.id, lines(number)[first : first + 500])
    await stored.begin(batch.id)
    return batch


async def found(store: Store, batch: StoredBatch) -> StoredBatch:
    read = await batches_of(store).get(batch.id, batch.owner)
    assert read is not None
    return read


async def ended(store: Store, batch: StoredBatch) -> StoredBatch:
    """Wait until a batch has ended."""
    async with asyncio.timeout(120):
        while not (read := await found(store, batch)).has_ended:
            await asyncio.sleep(0.02)
    return read


async def contents(store: Store, file_id: str | None, owner: str = OWNER) -> list[str]:
    """Return the lines of a file; none if there is no file."""
    if file_id is None:
        return []
    assert store.files
    file = await store.files.get(file_id, owner)
    assert file
    return b"".join([piece async for piece in store.files.chunks(file)]).decode().splitlines()


def answer_of(line: LineRequest, **fields: Any) -> LineAnswer:
    usual: dict[str, Any] = {"status": 200, "body": line.body, "request_id": f"req_{line.id}"}
    usual["use"] = Use(
        id=line.id, owner=line.owner, model="tiny", api="chat", input_tokens=2, output_tokens=3, is_line=True
    )
    usual |= fields
    return LineAnswer(**usual)


@dataclass
class Answers:
    """Answers to lines, which a test can hold back."""

    of: Callable[[LineRequest], LineAnswer] = answer_of
    asked: list[LineRequest] = field(default_factory=list)
    running: int = 0
    most: int = 0
    """The most that ran at once."""
    free: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, no answer comes."""

    def __post_init__(self) -> None:
        self.free.set()

    async def __call__(self, line: LineRequest) -> LineAnswer:
        self.asked.append(line)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            await self.free.wait()
            return self.of(line)
        finally:
            self.running -= 1

    async def wait_for(self, number: int) -> None:
        """Wait until so many lines have been asked for."""
        await wait_until(lambda: len(self.asked) >= number)


def output_line(line: StoredLine, result: LineResult) -> bytes:
    return f"{line.custom_id} {result.kind}\n".encode()


async def no_validation(batch: StoredBatch) -> None:
    raise AssertionError(f"{batch.id} needs no validation")


@asynccontextmanager
async def running_batches(
    store: Store,
    answer: Callable[[LineRequest], Awaitable[LineAnswer]],
    *,
    places: int = 4,
    validate: Callable[[StoredBatch], Awaitable[None]] = no_validation,
    name: str = "one",
    **options: Any,
) -> AsyncGenerator[BatchRunner, None]:
    """Run the batches of a store, so many lines at once, for the length of the block, as a server does."""
    await store.servers.join(name)
    runs = RunRegistry(store)
    engine = ScriptedEngine()
    pipeline = responses_pipeline(harmony_stages(load_encoding()), engine, runs)
    scheduler = Scheduler(pipeline, engine, runs, store, **options)

    def room(_: str | None = None) -> int:
        return places - len(runner.lines.tasks)

    runner = BatchRunner(scheduler, answer=answer, room=room, validate=validate, output_line=output_line)
    async with runner.running():
        yield runner
