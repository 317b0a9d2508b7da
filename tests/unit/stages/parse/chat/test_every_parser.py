"""Each tool call parser of vLLM: a call is read, and no text is lost, however it is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import FinishReason, GenerationFinished, TokenFrame
from penstock.pipeline.protocol.tools import Toolset
from tests.support.call_markup import CALL_MARKUP, CITY, END, WITHOUT_MARKUP, marked_model
from tests.support.examples import examples
from tests.support.parsed_output import (
    CHAT_TOOLS,
    ParsedItem,
    items_in_brief,
    parse_chat_frames,
    parsed_items,
    token_chunks,
    turn_started,
)
from tests.support.vllm_source import SINCE

pytestmark = pytest.mark.vllm

every_parser = pytest.mark.parametrize("parser", CALL_MARKUP)


def items_in(
    parser: str, token_ids: list[int], reason: FinishReason = "stop", tools: Toolset = CHAT_TOOLS, size: int = 1
) -> list[ParsedItem]:
    frames: list[TokenFrame] = [
        turn_started(tools=tools),
        *token_chunks(token_ids, size),
        GenerationFinished(reason, 0, 0.0),
    ]
    return parsed_items(parse_chat_frames(marked_model(parser), frames))


def tokens(parser: str, text: str) -> list[int]:
    return marked_model(parser).vocabulary.encode(text)


def test_every_parser_of_vllm_is_known() -> None:
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415 - takes seconds

    assert {*ToolParserManager.list_registered()} - SINCE.keys() == {*CALL_MARKUP, *WITHOUT_MARKUP}


@every_parser
@pytest.mark.parametrize("city", ["Paris", "a < b && c > d", 'say "no"', "{[(<\n\n>)]}", "🧑 €", "</"])
def test_call_is_read(parser: str, city: str) -> None:
    is_json = json.dumps(CITY) in CALL_MARKUP[parser]
    text = CALL_MARKUP[parser].replace(CITY, json.dumps(city, ensure_ascii=False)[1:-1] if is_json else city)
    for size in (1, 3, 1000):
        (item,) = items_in(parser, tokens(parser, text + END), size=size)
        assert (item.kind, item.name, item.complete) == ("FunctionCall", "get_weather", True)
        assert json.loads(item.text) == {"city": city}


@every_parser
def test_call_that_is_cut_loses_no_text_before_it(parser: str) -> None:
    token_ids = tokens(parser, "Let me look.\n" + CALL_MARKUP[parser].replace(CITY, "Paris"))
    first = len(tokens(parser, "Let me look.\n"))
    for count in range(first, len(token_ids)):
        items = items_in(parser, token_ids[:count], "length")
        assert items[0].kind == "Message"
        assert items[0].text.startswith("Let me look.")
        assert all(item.complete for item in items[:-1])
        assert all(json.loads(item.text) for item in items[1:] if item.kind == "FunctionCall" and item.complete)


@every_parser
@given(st.data())
@examples(5)
def test_pieces_of_calls_become_items(parser: str, data: st.DataObject) -> None:
    """Whatever the model writes, no exception comes, no words vanish, and chunks make no difference."""
    markup = CALL_MARKUP[parser].replace(CITY, "Paris")
    part = st.tuples(st.integers(0, len(markup)), st.integers(0, len(markup))).map(
        lambda span: markup[min(span) : max(span)]
    )
    text = "".join(
        data.draw(st.lists(part | st.text(max_size=4) | st.sampled_from(["Hello ", "\n", markup]), max_size=6))
    )
    token_ids = tokens(parser, text)
    reason: FinishReason = data.draw(st.sampled_from(("stop", "length")))
    tools = data.draw(st.sampled_from([CHAT_TOOLS, Toolset(), Toolset(CHAT_TOOLS.tools, "none")]))
    items = items_in(parser, token_ids, reason, tools)
    marks = marked_model(parser).vocabulary.mark_ids
    words = [token for token in token_ids if token not in marks]
    if reason == "stop" and marked_model(parser).vocabulary.decode(words).strip():
        assert items
    for size in (2, 1000):
        assert items_in_brief(items_in(parser, token_ids, reason, tools, size)) == items_in_brief(items)


@every_parser
def test_call_that_is_left_open_is_json_or_incomplete(parser: str) -> None:
    token_ids = tokens(parser, CALL_MARKUP[parser].replace(CITY, "Paris"))
    for count in range(len(token_ids)):
        for item in items_in(parser, token_ids[:count]):
            assert item.kind != "FunctionCall" or not item.complete or json.loads(item.text) in ({"city": "Paris"}, {})
