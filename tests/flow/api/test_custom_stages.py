from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import ConversedFrame, EmittedFrame, ItemClosed, ItemDelta, ParsedFrame, TurnFinished
from penstock.pipeline.plugins import guarded
from penstock.pipeline.protocol.events import OutputTextDelta
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import wait_until
from tests.support.event_streams import final, read_sse
from tests.support.server import ScriptedServer, running_server, script

Frame = TypeVar("Frame")

PATIENCE = 120.0

PLACES = ("normalize", "render", "generate", "parse", "converse", "emit", "persist")
"""The stages after which the broken stage is inserted."""

FAULTS = ("raises at once", "raises at the first", "raises in the middle", "raises at the end")
ENDS = ("ends at once", "ends at the first", "ends in the middle", "loses the last", "loses everything")


@dataclass(frozen=True)
class Broken:
    fault: str

    async def __call__(self, source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
        self._do("at once")
        if self.fault == "ends at once":
            return
        held: list[Frame] = []
        seen = 0
        async for frame in source:
            seen += 1
            self._do("at the first" if seen == 1 else "in the middle" if seen == 4 else "")
            if self.fault == "loses everything":
                continue
            if (self.fault, seen) in (("ends at the first", 1), ("ends in the middle", 4)):
                return
            if self.fault == "loses the last":
                if held:
                    yield held.pop()
                held.append(frame)
            else:
                yield frame
            if self.fault == "leaves":
                sys.exit(3)
        self._do("at the end")

    def _do(self, when: str) -> None:
        if self.fault == f"raises {when}":
            raise ZeroDivisionError("secret")


Edit = Callable[[Pipeline[Any, Any]], Pipeline[Any, Any]]


def breaking(place: str, stage: Any) -> Edit:
    return lambda pipeline: pipeline.insert_after(place, "crooked", stage)


def guarding(edit: Edit) -> Edit:
    """Return the edit with guards, as ``--with`` makes it."""
    return lambda pipeline: guarded(edit(pipeline), pipeline)


def is_harmless(place: str, fault: str) -> bool:
    """True if the fault never occurs, or occurs only after the response has ended."""
    has_one_frame, comes_late = place in ("normalize", "render"), place in ("emit", "persist")
    return (
        (has_one_frame and fault.endswith("in the middle"))
        or (comes_late and fault == "raises at the end")
        or (place == "persist" and fault.startswith("loses"))
    )


async def streamed(served: ScriptedServer) -> str:
    """Return the status of a streamed response, checked for validity, or the code of its HTTP error."""
    body = {"input": "Hi", "stream": True}
    async with served.client.post(f"{served.url}/v1/responses", json=body) as answer:
        raw = await answer.read()
        assert (answer.status == 200) == (b"event: " in raw)
        assert b"secret" not in raw
        return str(json.loads(raw)["error"]["code"]) if answer.status != 200 else final(read_sse(raw)).status


async def in_one(served: ScriptedServer) -> str:
    """Return the status of an unstreamed response, or the code of its HTTP error."""
    status, answer = await served.post({"input": "Hi"})
    return str(answer["error"]["code"] if status != 200 else answer["status"])


async def behind(served: ScriptedServer) -> str:
    """Return the final status of a background response, or the code of its HTTP error."""
    status, answer = await served.post({"input": "Hi", "background": True})
    return str(answer["error"]["code"] if status != 200 else (await served.wait_for_end(answer["id"]))["status"])


@pytest.mark.parametrize("fault", [*FAULTS, *ENDS])
@pytest.mark.parametrize("place", PLACES)
async def test_broken_stage_ends_only_its_response_and_is_named_in_the_log(
    place: str, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit = breaking(place, Broken(fault))
    async with running_server(ScriptedEngine(script()), tmp_path, edit=edit) as served:
        for ask in (streamed, in_one, behind):
            caplog.clear()
            async with asyncio.timeout(PATIENCE):
                outcome = await ask(served)
                await served.wait_until_idle()
                await wait_until(lambda: served.scheduler.in_flight.count == 0)
            if is_harmless(place, fault):
                assert outcome in ("completed", "server_error"), ask
            else:
                assert outcome in ("failed", "server_error"), ask
                assert ("crooked" if fault.startswith("raises") else "InvariantBroken") in caplog.text, ask


@pytest.mark.parametrize(
    "fault", ["raises in the middle", "ends at once", "ends in the middle", "loses the last", "leaves"]
)
@pytest.mark.parametrize("place", PLACES)
async def test_guarded_stage_is_named_with_its_line(
    place: str, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit = guarding(breaking(place, Broken(fault)))
    async with running_server(ScriptedEngine(script()), tmp_path, edit=edit) as served:
        async with asyncio.timeout(PATIENCE):
            outcome = await streamed(served)
    if not is_harmless(place, fault):
        assert outcome in ("failed", "server_error")
        assert "crooked" in caplog.text
        assert "/test_custom_stages.py:" in caplog.text
        assert "met a bug" not in caplog.text


# Its error message


async def drop_a_delta(source: AsyncIterator[EmittedFrame]) -> AsyncGenerator[EmittedFrame, None]:
    dropped = False
    async for frame in source:
        if dropped or not isinstance(frame, OutputTextDelta):
            yield frame
        dropped |= isinstance(frame, OutputTextDelta)


async def forget_an_end(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        if not isinstance(frame, ItemClosed):
            yield frame


async def forget_the_turn(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        if not isinstance(frame, TurnFinished):
            yield frame


async def forget_all_turns(source: AsyncIterator[ConversedFrame]) -> AsyncGenerator[ConversedFrame, None]:
    async for frame in source:
        if not isinstance(frame, TurnFinished):
            yield frame


async def talk_nonsense(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield "nonsense" if isinstance(frame, ItemDelta) else frame  # type: ignore[misc]


async def give_up(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        if isinstance(frame, ItemDelta):
            raise EngineFailed("It gave up.")
        yield frame


@pytest.mark.parametrize(
    ("place", "stage", "message"),
    [
        ("emit", drop_a_delta, "sequence numbers count from 0 without gaps"),
        ("parse", forget_an_end, "an item was not closed before what follows it"),
        ("parse", forget_the_turn, "every turn ends with TurnFinished"),
        ("parse", talk_nonsense, "met a bug in "),
        ("converse", forget_all_turns, "every turn ends with TurnFinished"),
        ("parse", give_up, "failed in crooked: It gave up."),
    ],
)
async def test_broken_rule_is_logged(
    place: str, stage: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def edit(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return pipeline.insert_after(place, "crooked", stage)

    async with asyncio.timeout(PATIENCE):
        async with running_server(ScriptedEngine(script()), tmp_path, edit=edit) as served:
            response = final(read_sse(await served.stream({"input": "Hi"})))
            assert await served.replay(response.id)
    assert response.status == "failed"
    assert message in caplog.text
