from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import RawMessages, TurnFinished
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol.events import ResponseFailed
from penstock.pipeline.protocol.response import InputTokensDetails, OutputTokensDetails, Response, Usage
from penstock.stages.emit.emit import ResponseWriter
from tests.support.event_streams import checked, final
from tests.support.frames import (
    Frames,
    client_events,
    finished,
    mcp_call,
    mcp_list,
    message,
    server_turns,
    started,
    written_events,
)

CALLED: Frames = (started(prompt_tokens=10), *mcp_call("{}"), finished(output_tokens=5, cached_tokens=0))


def response_of(*turns: Frames) -> Response:
    return final(checked(written_events(frame for turn in turns for frame in turn)))


def turn(prompt_tokens: int, output_tokens: int, **fields: Any) -> Frames:
    return (started(prompt_tokens=prompt_tokens), *message("Hello!"), counts(output_tokens, **fields))


def counts(output_tokens: int, cached_tokens: int = 0, reasoning_tokens: int = 0) -> TurnFinished:
    return finished(output_tokens=output_tokens, cached_tokens=cached_tokens, reasoning_tokens=reasoning_tokens)


def test_usage_is_summed_over_turns() -> None:
    response = response_of(CALLED[:-1], (counts(5),), turn(40, 7, cached_tokens=15, reasoning_tokens=3))
    assert response.usage == Usage(50, InputTokensDetails(15), 12, OutputTokensDetails(3, 25), 62)


def test_details_have_lists_only_with_raw_messages() -> None:
    """Clients check that the details of OpenAI's usage are numbers."""
    usage, detailed = response_of(server_turns()).usage, response_of(raw_turns()).usage
    numbers: dict[str, dict[str, int]] = msgspec.to_builtins(usage)
    assert all(type(value) is int for name in numbers if name.endswith("details") for value in numbers[name].values())
    assert detailed == Usage(
        14, InputTokensDetails(8, 0, (7, 7), (4, 4)), 40, OutputTokensDetails(16, 0, (20, 20), (0, 0)), 54
    )


def test_prompt_tokens_of_the_engine_take_precedence() -> None:
    """Images are many tokens to the engine, but placeholders in the prompt."""
    response = response_of((started(prompt_tokens=10), *message("Red."), finished(output_tokens=22, prompt_tokens=35)))
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.total_tokens) == (35, 57)


@pytest.mark.parametrize(("prompt_tokens", "from_tools"), [(15, 0), (14, 0), (3, 0), (16, 1)])
def test_truncated_prompt_has_no_negative_tool_tokens(prompt_tokens: int, from_tools: int) -> None:
    response = response_of(CALLED[:-1], (counts(5),), turn(prompt_tokens, 1))
    assert response.usage is not None
    assert response.usage.output_tokens_details.tool_output_tokens == from_tools


def test_listing_tools_is_no_turn() -> None:
    response = response_of(server_turns())
    assert response.usage is not None
    assert response.usage.input_tokens == 7 + 50


def test_completion_time_covers_all_turns() -> None:
    first = (started(created_at=1000), *mcp_call("{}"), finished(duration=1.5))
    assert response_of(first, (started(), finished(duration=2.0))).completed_at == 1003


def raw(*texts: str) -> RawMessages:
    return tuple({"role": "assistant", "content": text} for text in texts)


PROMPT: RawMessages = ({"role": "system"}, {"role": "user"})
FIRST, RESULT, SECOND = raw("call"), ({"role": "tool"},), raw("answer")


def raw_turns() -> Frames:
    return (
        started(raw_messages=PROMPT),
        *mcp_call("{}"),
        finished(raw_messages=FIRST),
        started(raw_messages=(*PROMPT, *FIRST, *RESULT)),
        *message("Hello!"),
        finished(raw_messages=SECOND),
    )


def test_raw_messages_cover_all_turns() -> None:
    response = response_of(raw_turns())
    assert response.input_messages == PROMPT
    assert response.output_messages == (*FIRST, *RESULT, *SECOND)


@pytest.mark.parametrize(
    ("frames", "kept"), [(1, ()), (len(mcp_call("{}")) + 2, FIRST), (len(mcp_call("{}")) + 3, (*FIRST, *RESULT))]
)
def test_failed_response_has_its_raw_messages_so_far(frames: int, kept: RawMessages) -> None:
    writer = ResponseWriter()
    events = client_events(event for frame in raw_turns()[:frames] for event in writer.feed(frame))
    events += client_events(writer.fail(EngineFailed("It broke.")))
    assert isinstance(events[-1], ResponseFailed)
    assert final(checked(events)).output_messages == kept


@pytest.mark.parametrize("frames", [(*CALLED, started()), (*mcp_list(),), ()])
def test_response_must_end_with_a_turn(frames: Frames) -> None:
    writer = ResponseWriter()
    for frame in (started(), finished(), *frames) if frames[:1] == CALLED[:1] else (server_turns()[0], *frames):
        list(writer.feed(frame))
    with pytest.raises(InvariantBroken, match="ends with TurnFinished"):
        writer.finish()


def test_each_turn_has_its_own_format() -> None:
    text = {"format": {"type": "json_object"}}
    free, held = started(text=text), started(text=text)
    held = replace(held, held_to_grammar=True)
    good = (free, *message("Let me see."), finished(), held, *message("{}"), finished())
    assert response_of(good).status == "completed"
    writer = ResponseWriter()
    with pytest.raises(EngineFailed, match="format of this request"):
        for frame in (*good[:-4], *message("No.")):
            list(writer.feed(frame))
