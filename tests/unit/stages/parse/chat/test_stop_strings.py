"""Stop strings cut the messages of chat models, and neither thoughts nor calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import frames
from tests.support.chat_families import family_model
from tests.support.parsed_output import (
    chat_tokens,
    chat_turn_started,
    cut_chunks,
    parse_chat,
    parse_chat_frames,
    parsed_items,
)
from tests.support.stop_strings import check_turn

pytestmark = pytest.mark.vllm

chat_items = st.lists(
    st.tuples(st.sampled_from(["thought", "message", "call"]), st.text("abé", min_size=1, max_size=12)), max_size=5
)
chunk_ends = st.lists(st.integers(0, 300))
stop_strings = st.lists(st.text("abé", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple)


THOUGHT_END = "a\n</think>\n\n"
"""The prompt ends in an open thought."""


def chat_markup(kind: str, text: str) -> str:
    match kind:
        case "thought":
            return f"<think>\n{text}\n</think>\n\n"
        case "call":
            call = json.dumps({"name": "get_weather", "arguments": {"city": text}}, ensure_ascii=False)
            return f"<tool_call>\n{call}\n</tool_call>\n"
        case _:
            return text


@given(chat_items, stop_strings, chunk_ends)
def test_only_messages_are_cut(items: list[tuple[str, str]], stops: tuple[str, ...], ends: list[int]) -> None:
    tokens = chat_tokens("qwen3", THOUGHT_END + "".join(chat_markup(*item) for item in items))
    chunks = cut_chunks(tokens, [end % (len(tokens) + 1) for end in ends], likely=False)
    last = frames.GenerationFinished("length", 0, 0.0)

    def read(*, is_slow: bool, stop: tuple[str, ...] = ()) -> list[frames.ParsedFrame]:
        started = chat_turn_started("qwen3", stop=stop)
        return parse_chat_frames(family_model("qwen3"), [started, *chunks, last], is_slow=is_slow)

    whole = parsed_items(read(is_slow=False))
    for is_slow in (False, True):
        check_turn(read(is_slow=is_slow, stop=stops), whole, stops)


def test_white_space_between_items_has_stop_strings() -> None:
    text = f"{THOUGHT_END}one\n\ntwo\n\n{chat_markup('call', 'Oslo')}"
    _, item = parse_chat("qwen3", text, stop=("two\n\n",))
    assert item.text == "one\n\n"
    _, item = parse_chat("qwen3", text, stop=("\n\n",))
    assert item.text == "one"
