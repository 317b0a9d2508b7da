"""The Harmony parser as a machine; whole malformed streams are in ``fixtures/harmony``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import HarmonyEncoding as HarmonyPackageEncoding
from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

from pipeline.frames import (
    FinishReason,
    GenerationFinished,
    ItemDelta,
    ParsedFrame,
    TokenChunk,
    TokenFrame,
    TurnFinished,
)
from pipeline.record import read_frames
from stages.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, HarmonyEncoding, load_encoding
from stages.parse.harmony import HarmonyParser
from stages.parse.text import TokenDecoder
from tests.stages.parse.told import items, parse, summary

FIXTURES = Path(__file__).parents[3] / "fixtures" / "harmony"
RECORDINGS = sorted(FIXTURES.glob("*/tokens.jsonl"))


# Any chunking


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("size", [2, 5, 1000])
def test_chunks_do_not_matter(recording: Path, size: int, encoding: HarmonyEncoding) -> None:
    """However the engine cuts the tokens into chunks, the items are the same (defects 8, 9, 10, B8, B10)."""
    frames = list(read_frames(recording, TokenFrame))
    tokens = [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]
    started, finished = frames[0], frames[-1]

    def run(size: int) -> list[ParsedFrame]:
        parser = HarmonyParser(encoding)
        chunks = [TokenChunk(tuple(tokens[at : at + size])) for at in range(0, len(tokens), size)]
        return [parsed for frame in [started, *chunks, finished] for parsed in list(parser.feed(frame))]

    assert summary(items(run(size))) == summary(items(run(1)))
    assert run(size)[-1] == run(1)[-1]


# Any tokens at all

MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
HEADER_WORDS = ("assistant", "analysis", "commentary", "final", " to=functions.f", " json", "user", " to=python", "\n")


def header_tokens() -> list[int]:
    return [token for word in HEADER_WORDS for token in load_encoding().encode(word)]


def soup() -> st.SearchStrategy[list[int]]:
    """Markers, header words, broken UTF-8, reserved ids, ids beyond the vocabulary, and any text."""
    return st.lists(
        st.one_of(
            st.sampled_from(MARKERS),
            st.deferred(lambda: st.sampled_from(header_tokens())),
            st.integers(0, 199_997),
            st.sampled_from([160, 187, 222, 624, 4103, 9552, 28823]),
            st.integers(199_998, 201_200),
        ),
        max_size=60,
    )


@given(soup(), st.sampled_from(["stop", "length"]), st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_items(tokens: list[int], reason: FinishReason, data: st.DataObject) -> None:
    """The machine never raises, keeps the grammar of its junction, and does not care for chunks."""
    encoding = load_encoding()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    chunks = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    assert summary(parse(encoding, chunks, reason)) == summary(parse(encoding, ([t] for t in tokens), reason))


@given(soup())
@settings(max_examples=300, deadline=None)
def test_no_content_is_lost_and_no_marker_gets_out(tokens: list[int]) -> None:
    """Each ``<|message|>`` opens an item that ends in all the text behind it; no soup is long enough to be cut."""
    encoding = load_encoding()
    told = [item.text for item in parse(encoding, [tokens]) if "missing message" not in item.repairs]
    for text, run in zip(told, contents(encoding, tokens), strict=True):
        assert text.endswith(run)


def contents(encoding: HarmonyEncoding, tokens: Iterable[int]) -> list[str]:
    """What stands between ``<|message|>`` and the next marker that ends a message."""
    runs: list[bytearray] = []
    in_content = False
    for token in tokens:
        if in_content and token < 199_998:
            runs[-1] += encoding.token_bytes[token]
        elif token in (START, END, RETURN, CALL, 199_999) or (in_content and token == CHANNEL):
            in_content = False
        elif token == MESSAGE and not in_content:
            runs.append(bytearray())
            in_content = True
    return [run.decode(errors="replace") for run in runs]


@given(st.lists(st.one_of(st.integers(0, 199_997), st.sampled_from([160, 187, 222, 624, 4103, 28823])), max_size=20))
@settings(max_examples=200, deadline=None)
def test_split_characters_are_joined(tokens: list[int]) -> None:
    """The decoder gives what decoding all bytes at once would give."""
    encoding = load_encoding()
    decoder = TokenDecoder(encoding)
    text = "".join([*map(decoder.decode, tokens), decoder.flush()])
    assert text == b"".join(encoding.token_bytes[token] for token in tokens).decode(errors="replace")


# Agreement with the package


@cache
def package() -> HarmonyPackageEncoding:
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@st.composite
def conversations(draw: st.DrawFn) -> str:
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(lambda t: "<|" not in t)
    headers = [
        "<|channel|>analysis",
        "<|channel|>commentary",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
    ]
    messages = draw(st.lists(st.tuples(st.sampled_from(headers), text), min_size=1, max_size=5))
    return "<|end|><|start|>assistant".join(f"{header}<|message|>{text}" for header, text in messages) + "<|return|>"


@given(conversations())
@settings(max_examples=100, deadline=None)
def test_well_formed_streams_agree_with_openai_harmony(completion: str) -> None:
    """What openai_harmony's own parser makes of well-formed output, ours makes as well."""
    encoding = load_encoding()
    tokens = encoding.encode_markup(completion)
    theirs = [message.to_dict() for message in package().parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)]
    kinds = {
        "analysis": ("Reasoning", ""),
        "commentary": ("Message", "commentary"),
        "final": ("Message", "final_answer"),
    }
    assert [(item.kind, item.name, item.text) for item in parse(encoding, [tokens])] == [
        (*(("FunctionCall", "f") if "recipient" in message else kinds[message["channel"]]), content["text"])
        for message in theirs
        for content in message["content"]
    ]


# Counting


def test_tokens_are_counted(encoding: HarmonyEncoding) -> None:
    """Every generated token counts as output, those that became reasoning text as reasoning."""
    parser = HarmonyParser(encoding)
    tokens = encoding.encode_markup(
        "<|channel|>analysis<|message|>one two three<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"
    )
    list(parser.feed(TokenChunk(tuple(tokens))))
    *_, finished = parser.feed(GenerationFinished("stop", 7, 1.5))
    assert finished == TurnFinished("stop", 7, len(tokens), 3, 1.5)


def test_a_long_header_is_an_answer(encoding: HarmonyEncoding) -> None:
    """What goes on for 64 tokens without ``<|message|>`` is streamed, not held back to the end."""
    parser = HarmonyParser(encoding)
    tokens = encoding.encode("word " * 200)
    frames = [frame for token in tokens[:80] for frame in list(parser.feed(TokenChunk((token,))))]
    assert len([frame for frame in frames if isinstance(frame, ItemDelta)]) > 10
