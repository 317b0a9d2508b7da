"""Steered responses: they end between two items, never without the output of a call, and the engine stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import frames
from penstock.pipeline.core import source_of
from penstock.pipeline.protocol.items import OutputItem
from penstock.pipeline.protocol.response import IncompleteDetails, Response
from penstock.stages.converse.converse import Steering
from penstock.stages.emit.emit import Emit
from tests.support.event_streams import checked, final
from tests.support.frames import client_events, frame_source
from tests.support.scripted_tools import ScriptedConverse, Turn, answer, code, conversation, function, thought, turn

STEERED = IncompleteDetails("steered")


@dataclass
class Client:
    """A client that steers once it has got ``after`` frames."""

    after: int
    seen: int = 0
    stopped: list[str] = field(default_factory=list)

    def wants(self, response_id: str) -> bool:
        return self.seen >= self.after

    async def stop(self, response_id: str) -> None:
        self.stopped.append(response_id)

    async def talk(self, *turns: Turn) -> tuple[Response, list[frames.ConversedFrame], int]:
        """Return the response, its frames, and the number of turns that the model began."""
        table = ScriptedConverse(turns, steering=Steering(self.wants, self.stop))
        passed: list[frames.ConversedFrame] = []
        async with aclosing(table.converse(source_of([conversation()]))) as yielded:
            async for frame in yielded:
                passed.append(frame)
                self.seen += 1
        async with aclosing(Emit()(frame_source(passed))) as events:
            return final(checked(client_events([event async for event in events][1:]))), passed, len(table.model.read)


def texts(items: Sequence[OutputItem]) -> list[str]:
    return [str(getattr(item, "text", "")) for item in items]


async def test_open_item_is_finished_and_the_rest_dropped() -> None:
    client = Client(after=3)
    response, _, _ = await client.talk(turn(thought("I think."), answer("No."), answer("Really.")))
    assert texts(response.output) == ["I think."]
    assert (response.status, response.incomplete_details) == ("incomplete", STEERED)
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    assert client.stopped == ["resp_1"]


async def test_response_may_end_before_its_first_item() -> None:
    response, _, _ = await Client(after=0).talk(turn(thought(), answer()))
    assert (response.output, response.incomplete_details) == ((), STEERED)


async def test_response_at_its_last_item_is_completed() -> None:
    client = Client(after=6)
    response, _, _ = await client.talk(turn(thought("Hm."), answer("Done.")))
    assert (response.status, texts(response.output)) == ("completed", ["Hm.", "Done."])
    assert client.stopped == []


async def test_calls_of_the_turn_run_before_it_ends() -> None:
    client = Client(after=3)
    response, _, turns = await client.talk(turn(code("1 + 1"), code("2 + 2")), turn(answer()))
    assert texts(response.output) == ["1 + 1", "2 + 2"]
    assert {item.status for item in response.output} == {"completed"}
    assert (response.incomplete_details, turns, client.stopped) == (STEERED, 1, [])


async def test_calls_for_the_client_end_the_response_as_ever() -> None:
    response, _, _ = await Client(after=4).talk(turn(function("ask"), function("tell"), answer("So.")))
    assert (response.status, len(response.output)) == ("completed", 3)


_items = st.sampled_from([thought("a"), answer("b"), code("c"), function("d")])
_turns = st.lists(st.lists(_items, min_size=1, max_size=4).map(lambda items: turn(*items)), min_size=1, max_size=3)


@given(_turns, st.integers(0, 40))
def test_steered_response_is_the_beginning_of_the_other(turns: list[Turn], after: int) -> None:
    async def talk() -> tuple[Any, Any]:
        steered, passed, _ = await Client(after).talk(*turns, turn(answer("e")))
        whole, others, _ = await Client(1_000).talk(*turns, turn(answer("e")))
        count = len(passed) - 1
        assert passed[:count] == others[:count]
        assert steered.output == whole.output[: len(steered.output)]
        return steered, whole

    steered, whole = asyncio.run(talk())
    if steered != whole:
        assert steered.incomplete_details == STEERED
        assert "function_call" not in [item.__struct_config__.tag for item in steered.output]


async def test_engine_stops_once_in_each_turn_that_a_stop_string_ends() -> None:
    client = Client(after=1_000)
    stopped = [*answer("b")[:-1], frames.ItemClosed(True, stopped=True)]
    response, _, turns = await client.talk(turn(code("1 + 1"), stopped), turn(thought("a"), stopped))
    assert (response.status, texts(response.output)) == ("completed", ["1 + 1", "b", "a", "b"])
    assert (client.stopped, turns) == (["resp_1", "resp_1"], 2)
