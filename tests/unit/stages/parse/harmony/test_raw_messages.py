"""Raw messages: the output of the model in Harmony's own terms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from openai_harmony import Message, Role

from penstock.pipeline.frames import GenerationFinished, TokenChunk, TurnFinished
from penstock.pipeline.protocol.tools import CustomTool, Toolset
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, load_encoding
from tests.support.harmony import reference_encoding, wellformed_completions
from tests.support.parsed_output import EVERY_TOOL, parse_harmony_frames, turn_started


def raw(encoding: HarmonyEncoding, text: str, **fields: Any) -> Any:
    chunks = [TokenChunk((token,)) for token in encoding.encode_markup(text)]
    frames = parse_harmony_frames(
        encoding, [turn_started(raw_messages=(), **fields), *chunks, GenerationFinished("stop", 0, 0.0)]
    )
    assert isinstance(frames[-1], TurnFinished)
    return frames[-1].raw_messages


@given(wellformed_completions())
def test_raw_messages_equal_those_of_openai_harmony(completion: str) -> None:
    tokens = load_encoding().encode_markup(completion)
    theirs = reference_encoding().parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    assert list(raw(load_encoding(), completion)) == [message.to_dict() for message in theirs]


def test_raw_messages_are_optional() -> None:
    encoding = load_encoding()
    (_, finished) = parse_harmony_frames(encoding, [turn_started(), GenerationFinished("stop", 0, 0.0)])
    assert isinstance(finished, TurnFinished)
    assert finished.raw_messages is None
    assert raw(encoding, "<|return|>") == ()


def test_broken_messages_become_readable_ones(encoding: HarmonyEncoding) -> None:
    messages = raw(
        encoding,
        "<|channel|>analysis––commentary<|message|>hm<|start|>assistantfinal<|message|>so<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.shell <|constrain|>code<|message|>ls 𓀀<|call|>",
        tools=Toolset((CustomTool("shell"),)),
    )
    assert [Message.from_dict(message).to_dict() for message in messages] == list(messages)
    parsed = [(m["channel"], m.get("recipient"), m.get("content_type"), m["content"][0]["text"]) for m in messages]
    assert parsed == [
        ("analysis", None, None, "hm"),
        ("final", None, None, "so"),
        ("commentary", "functions.shell", "<|constrain|>code", "ls 𓀀"),
    ]


@pytest.mark.parametrize("recipient", ["python", "browser.open", "container.exec", "docs.look-up", "docs.write"])
def test_server_side_calls_keep_their_header(recipient: str, encoding: HarmonyEncoding) -> None:
    (message,) = raw(encoding, f"<|channel|>analysis to={recipient} code<|message|>x<|call|>", tools=EVERY_TOOL)
    assert (message["channel"], message["recipient"], message["content_type"]) == ("analysis", recipient, "code")
    (bare,) = raw(encoding, f" to={recipient}<|message|>x<|call|>", tools=EVERY_TOOL)
    assert bare["channel"] == ("commentary" if recipient.startswith("docs.") else "analysis")
    assert Message.from_dict(bare).to_dict() == bare


def test_raw_message_includes_the_stop_string(encoding: HarmonyEncoding) -> None:
    """The answer leaves it out, but the model wrote it."""
    (message,) = raw(encoding, "<|channel|>final<|message|>one STOP", stop=("STOP",))
    assert message["content"] == [{"type": "text", "text": "one STOP"}]
