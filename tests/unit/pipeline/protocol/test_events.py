from __future__ import annotations

import pytest

from penstock.pipeline.frames import FinishReason
from penstock.pipeline.protocol.events import to_sse
from tests.support.frames import finished, message, sse_json, started, whole_turn, written_events

RESPONSE_FIELDS = """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
"""


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_every_sent_response_has_all_31_fields(reason: FinishReason) -> None:
    events = written_events((started(), *message("Hello!"), finished(reason)))
    for event in (events[0], events[1], events[-1]):
        assert sorted(sse_json(event)["response"]) == sorted(RESPONSE_FIELDS.split())
    assert len(RESPONSE_FIELDS.split()) == 31


def test_event_name_is_the_type() -> None:
    for event in written_events(whole_turn()):
        assert sse_json(event)["type"] == event.__struct_config__.tag
        assert to_sse(event).split(b"\ndata: ")[1].startswith(b'{"type":"response.')


def test_line_ends_in_a_text_stay_inside_its_json() -> None:
    for event in written_events((started(), *message("a\r\n\n\u2028\x85b"), finished())):
        assert sse_json(event)["sequence_number"] == event.sequence_number
        assert b"\r" not in to_sse(event)
