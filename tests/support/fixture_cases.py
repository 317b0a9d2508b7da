"""Recorded cases: one folder each, one file per junction, and what runs a stage from one file to the next."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.core import Pipeline, Stage
from pipeline.frames import Conversation, ConversedFrame, EmittedFrame, ItemResult, ItemTokens
from pipeline.protocol.response import Response
from pipeline.record import FORMAT, Header, read_frames, replay, write_frames
from stages.emit.emit import emit
from stages.persist.live import LiveResponses
from stages.persist.persist import Persist
from stages.persist.store import Store
from tests.support.event_streams import checked, final

CREATED_AT = 1_790_000_000.0

HARMONY_HEADER = Header(FORMAT, "tiny-gpt-oss")

Frame = TypeVar("Frame")


class Case:
    """The files of one fixture; ``regen`` writes where it would compare."""

    def __init__(self, folder: Path, *, regen: bool, header: Header = HARMONY_HEADER) -> None:
        self.folder = folder
        self.regen = regen
        self.header = header

    def path(self, junction: str) -> Path:
        return self.folder / junction

    def read(self, junction: str, frames: Any) -> list[Any]:
        return list(read_frames(self.path(junction), frames))

    def write(self, junction: str, frames: Iterable[Any]) -> None:
        write_frames(self.path(junction), frames, self.header)

    def has(self, junction: str) -> bool:
        return self.regen or self.path(junction).is_file()

    def expect(self, junction: str, frames: list[Any], types: Any) -> None:
        """The frames are those of the file; a recording need not have one for each junction."""
        if self.regen:
            self.write(junction, frames)
        if self.has(junction):
            assert frames == self.read(junction, types)

    @property
    def born(self) -> tuple[str, float, str]:
        """What its ids are made of, its time, and its model: as recorded, or else by its name."""
        if self.regen or not self.has("conversation.jsonl"):
            return suffix_of(self.folder), CREATED_AT, self.header.model
        response = self.read("conversation.jsonl", Conversation)[0].response
        return response.id.removeprefix("resp_"), float(response.created_at), response.model


@dataclass(frozen=True)
class Tap:
    """A stage that lets everything through, and keeps it."""

    kept: list[Any] = field(default_factory=list)

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        async for frame in source:
            self.kept.append(frame)
            yield frame


async def through(stage: Stage[Any, Any], frames: Iterable[Any]) -> list[Any]:
    return await flowing(Pipeline.start("stage", stage), frames)


async def flowing(pipeline: Pipeline[Any, Any], frames: Iterable[Any]) -> list[Any]:
    async with pipeline.open(replay(frames)) as stream:
        return [frame async for frame in stream]


def suffix_of(folder: Path) -> str:
    """What the ids of a case are made of: its name."""
    return folder.name.encode().hex()[:32].ljust(32, "0")


async def told(case: Case, store: Store, source: str) -> None:
    """From the items, which are in the file ``source``, to what is stored of the response."""
    case.expect("events.jsonl", await through(emit, case.read(source, ConversedFrame)), EmittedFrame)
    emitted = case.read("events.jsonl", EmittedFrame)
    events = await through(Persist(LiveResponses(store)), emitted)
    response = final(checked(events))
    if not case.has("response.json"):
        return
    if case.regen:
        case.path("response.json").write_bytes(msgspec.json.format(msgspec.json.encode(response)) + b"\n")
    assert response == msgspec.json.decode(case.path("response.json").read_bytes(), type=Response)
    stored = await store.get(response.id, "")
    assert stored is not None
    assert stored.response == response
    assert stored.tokens == {told.item_id: told.token_ids for told in emitted if isinstance(told, ItemTokens)}
    assert stored.results == {told.item_id: told.result for told in emitted if isinstance(told, ItemResult)}
