"""The messages of a prompt in openai_harmony's own JSON."""

from __future__ import annotations

import openai_harmony as reference

from penstock.pipeline.frames import with_facts
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.render.harmony.render import RenderHarmony
from tests.support.harmony import call, conversation, function, message, output, reasoning, reference_encoding

ASKED = with_facts(
    conversation(
        *(message("user", "Weather?"), reasoning("Look."), call("f", '{"a": 1}', namespace="n"), output("Rain.")),
        message("assistant", "Wait.", phase="commentary"),
        instructions="Be brief.",
        tools=[function("f", {"type": "object"}, namespace="n")],
    ),
    wants_raw_messages=True,
)


def test_raw_messages_can_be_read_by_openai_harmony() -> None:
    prompt = RenderHarmony(load_encoding()).prompt(ASKED)
    assert prompt.raw_messages is not None
    messages = [reference.Message.from_dict(raw) for raw in prompt.raw_messages]
    assert [message.to_dict() for message in messages] == list(prompt.raw_messages)
    again = [reference_encoding().render(message) for message in messages if message.recipient is None]
    text = load_encoding().decode(prompt.token_ids)
    assert all(load_encoding().decode(ids) in text for ids in again)


def test_calls_and_outputs_have_recipient_and_author() -> None:
    raw = RenderHarmony(load_encoding()).prompt(ASKED).raw_messages or ()
    assert raw[4:6] == (
        {
            "role": "assistant",
            "name": None,
            "content": [{"type": "text", "text": '{"a": 1}'}],
            "channel": "commentary",
            "recipient": "n.f",
            "content_type": "json",
        },
        {
            "role": "tool",
            "name": "n.f",
            "content": [{"type": "text", "text": "Rain."}],
            "channel": "commentary",
            "recipient": "assistant",
        },
    )


def test_raw_messages_are_optional() -> None:
    assert RenderHarmony(load_encoding()).prompt(conversation(message("user", "?"))).raw_messages is None
