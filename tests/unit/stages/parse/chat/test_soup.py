"""Random output of a chat model: it is parsed, and chunks make no difference."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import ChatTurn, FinishReason, GenerationFinished, TokenChunk, TokenFrame, TokenLogprob
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.parse.chat.parse import ChatParser
from tests.support.chat_families import FAMILIES, family_model, load_model
from tests.support.examples import examples
from tests.support.parsed_output import (
    CHAT_TOOLS,
    ParsedItem,
    chat_tokens,
    chat_turn_started,
    counted_tokens,
    joined_deltas,
    parse_chat_frames,
    parsed_items,
    token_chunks,
    turn_started,
)

SNIPPETS = (
    *("\n", "\n\n", " ", "Hello", "<", "</", "{", "}", "[", "]", '"', "\\", "π", "🧑", "`", ">"),
    *('{"name": "get_weather", "arguments": ', '{"city": "Paris"}', "get_weather", "note", "nope", '{"input": "a\\n"}'),
    *("<function=get_weather>", "<parameter=city>", "</parameter>", "</function>", "<tool_call", "call:note{"),
    *('[{"name": "note", "parameters": ', "functions.get_weather:0", "json\n```", "<invoke name="),
)
REQUESTED = (
    CHAT_TOOLS,
    Toolset(),
    Toolset(CHAT_TOOLS.tools, "none"),
    Toolset(CHAT_TOOLS.tools, allowed=((None, "note"),)),
)
REASONS: tuple[FinishReason, ...] = ("stop", "length", "cancelled")
SYNTAXES = ("native", "native", "native", "list", "arguments")


@st.composite
def soup(draw: st.DrawFn, family: str) -> list[int]:
    """Draw marks, markup, text, partial characters and unknown ids; a stop token can only be the last one."""
    vocabulary, stops = family_model(family).vocabulary, family_model(family).stop_token_ids
    bits = draw(
        st.lists(
            st.one_of(
                st.sampled_from(sorted(vocabulary.marks.values())).map(lambda token: [token]),
                st.sampled_from(SNIPPETS).map(vocabulary.encode),
                st.text(max_size=6).map(vocabulary.encode),
                st.integers(0, max(vocabulary.token_bytes) + 8).map(lambda token: [token]),
            ),
            max_size=24,
        )
    )
    end = draw(st.sampled_from([[], [*stops][:1]]))
    return [*(token for token in chain.from_iterable(bits) if token not in stops), *end]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the options of a request that affect the parser."""
    turn = ChatTurn({}, draw(st.sampled_from(SYNTAXES)), draw(st.booleans()))
    return {
        "tools": draw(st.sampled_from(REQUESTED)),
        "stop": draw(st.sampled_from([(), (), ("e",), ("\n", "Paris")])),
        "raw_messages": draw(st.sampled_from([None, ()])),
        "turn": turn,
    }


def unread() -> ChatModel:
    """A model without parsers, so that its marks have no meaning."""
    return load_model(reasoning_parser="none", tool_call_parser="none")


@st.composite
def noise(draw: st.DrawFn) -> list[int]:
    """Draw marks, partial characters and unknown ids, like the output of random weights."""
    vocabulary, stops = unread().vocabulary, unread().stop_token_ids
    tokens = st.integers(0, max(vocabulary.token_bytes) + 8) | st.sampled_from(sorted(vocabulary.marks.values()))
    return draw(st.lists(tokens.filter(lambda token: token not in stops), min_size=1, max_size=24))


def words(family: str, token_ids: list[int]) -> str:
    """The text of the tokens without marks, white space and unknown characters."""
    vocabulary = family_model(family).vocabulary
    plain = [token for token in token_ids if token not in vocabulary.mark_ids]
    return "".join(vocabulary.decode(plain).replace("�", "").split())


def parsed(family: str, chunks: list[TokenChunk], request: dict[str, Any], reason: FinishReason) -> list[ParsedItem]:
    frames = parse_chat_frames(
        family_model(family), [chat_turn_started(family, **request), *chunks, GenerationFinished(reason, 0, 0.0)]
    )
    return parsed_items(frames)


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
@examples(30)
def test_any_tokens_become_items(family: str, data: st.DataObject) -> None:
    token_ids = data.draw(soup(family))
    request = data.draw(requests())
    reason = data.draw(st.sampled_from(REASONS))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(token_ids)))))
    found = [TokenLogprob(-1.0)] * len(token_ids) if data.draw(st.booleans()) else []
    spans = pairwise([0, *cuts, len(token_ids)])
    chunks = [TokenChunk(tuple(token_ids[a:b]), tuple(found[a:b])) for a, b in spans if a < b]
    items = parsed(family, chunks, request, reason)
    one_by_one = [TokenChunk((token,), tuple(found[:1])) for token in token_ids]
    assert joined_deltas(items) == joined_deltas(parsed(family, one_by_one, request, reason))
    if reason == "stop" and not request["stop"] and words(family, token_ids):
        assert items
    speaks = [item for item in items if item.kind in ("Message", "Reasoning") and not item.repairs]
    assert all(item.text for item in speaks) or request["stop"]
    whole = [*chain.from_iterable(item.token_ids for item in items)]
    is_in_order = all(item.complete and not item.repairs for item in items)
    if items and reason == "stop" and not request["stop"] and is_in_order:
        assert whole == token_ids
    assert not any(item.token_ids for item in items if item.repairs or not item.complete)
    assert all(item.complete for item in items[:-1] if "Call" not in item.kind)
    assert not items or items[-1].complete or reason != "stop" or "Call" in items[-1].kind


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
@examples(10)
def test_hot_path_equals_slow_path(family: str, data: st.DataObject) -> None:
    chunks = token_chunks(data.draw(soup(family)), data.draw(st.integers(1, 3)))
    started = chat_turn_started(family, **data.draw(requests()))
    frames: list[TokenFrame] = [started, *chunks, GenerationFinished(data.draw(st.sampled_from(REASONS)), 0, 0.0)]
    model = family_model(family)
    assert parse_chat_frames(model, frames) == parse_chat_frames(model, frames, is_slow=True)


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
@examples(10)
def test_tokens_are_counted_before_the_end(family: str, data: st.DataObject) -> None:
    chunks = token_chunks(data.draw(soup(family)), data.draw(st.integers(1, 3)))
    parser = ChatParser(family_model(family), chat_turn_started(family, **data.draw(requests())))
    before, after, counted = counted_tokens(parser, chunks)
    assert after == counted
    assert before.reasoning <= counted.reasoning
    assert before._replace(reasoning=counted.reasoning) == counted


def test_tokens_of_an_open_thought_are_reasoning() -> None:
    chunks = token_chunks(chat_tokens("qwen3", "<think>\nLet me see what the weather is"))
    before, _, counted = counted_tokens(ChatParser(family_model("qwen3"), chat_turn_started("qwen3")), chunks)
    assert before == counted
    assert before.reasoning == before.output - 1  # without the mark


@given(noise(), st.sampled_from(REASONS))
def test_logprobs_spell_unparsed_marks(token_ids: list[int], reason: FinishReason) -> None:
    found = TokenLogprob(-1.0)
    chunks = [TokenChunk((token,), (found,)) for token in token_ids]
    for item in parsed_items(
        parse_chat_frames(unread(), [turn_started(logprobs=0), *chunks, GenerationFinished(reason, 0, 0.0)])
    ):
        spelled = b"".join(bytes(logprob.bytes) for logprob in item.logprobs).decode(errors="replace")
        assert item.text in spelled
        assert all(item.text.count(mark) == spelled.count(mark) for mark in unread().vocabulary.marks)
