"""Raw messages: what the model wrote, in its own terms, for whoever asked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from openai_harmony import Message, Role

from pipeline.frames import GenerationFinished, TokenChunk, TurnFinished
from pipeline.protocol.tools import CustomTool, Toolset
from stages.harmony import HarmonyEncoding, load_encoding
from tests.support.parsed_items import run, started
from tests.support.random_harmony import EVERY_TOOL
from tests.support.wellformed_harmony import completions, package


def raw(encoding: HarmonyEncoding, text: str, **fields: Any) -> Any:
    chunks = [TokenChunk((token,)) for token in encoding.encode_markup(text)]
    frames = run(encoding, [started(raw_messages=(), **fields), *chunks, GenerationFinished("stop", 0, 0.0)])
    assert isinstance(frames[-1], TurnFinished)
    return frames[-1].raw_messages


@given(completions())
@settings(max_examples=100, deadline=None)
def test_raw_messages_are_those_of_openai_harmony(completion: str) -> None:
    """For well-formed output, they are what the package's own parser finds."""
    tokens = load_encoding().encode_markup(completion)
    theirs = package().parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    assert list(raw(load_encoding(), completion)) == [message.to_dict() for message in theirs]


def test_nobody_asked() -> None:
    """Not asked for, there are none; asked for, an empty turn has an empty list."""
    encoding = load_encoding()
    (_, finished) = run(encoding, [started(), GenerationFinished("stop", 0, 0.0)])
    assert isinstance(finished, TurnFinished)
    assert finished.raw_messages is None
    assert raw(encoding, "<|return|>") == ()


def test_broken_messages_are_told_as_understood(encoding: HarmonyEncoding) -> None:
    """Each item is one message that the package can read, whatever its header looked like."""
    messages = raw(
        encoding,
        "<|channel|>analysis––commentary<|message|>hm<|start|>assistantfinal<|message|>so<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.shell <|constrain|>code<|message|>ls 𓀀<|call|>",
        tools=Toolset((CustomTool("shell"),)),
    )
    assert [Message.from_dict(message).to_dict() for message in messages] == list(messages)
    told = [(m["channel"], m.get("recipient"), m.get("content_type"), m["content"][0]["text"]) for m in messages]
    assert told == [
        ("analysis", None, None, "hm"),
        ("final", None, None, "so"),
        ("commentary", "functions.shell", "<|constrain|>code", "ls 𓀀"),
    ]


@pytest.mark.parametrize("recipient", ["python", "browser.open", "container.exec", "docs.look-up", "docs.write"])
def test_calls_that_the_server_runs_are_told_as_written(recipient: str, encoding: HarmonyEncoding) -> None:
    """A raw call has the channel, the recipient and the form that the model wrote, or the one it should have."""
    (message,) = raw(encoding, f"<|channel|>analysis to={recipient} code<|message|>x<|call|>", tools=EVERY_TOOL)
    assert (message["channel"], message["recipient"], message["content_type"]) == ("analysis", recipient, "code")
    (bare,) = raw(encoding, f" to={recipient}<|message|>x<|call|>", tools=EVERY_TOOL)
    assert bare["channel"] == ("commentary" if recipient.startswith("docs.") else "analysis")
    assert Message.from_dict(bare).to_dict() == bare


def test_a_stop_text_was_written_too(encoding: HarmonyEncoding) -> None:
    """What the answer leaves out, the model has written all the same."""
    (message,) = raw(encoding, "<|channel|>final<|message|>one STOP", stop=("STOP",))
    assert message["content"] == [{"type": "text", "text": "one STOP"}]
