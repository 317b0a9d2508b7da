"""The Harmony parser as a machine; whole malformed streams are in ``fixtures/harmony``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import HarmonyEncoding as HarmonyPackageEncoding
from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

from pipeline.frames import (
    FinishReason,
    FunctionCallOpened,
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    Repair,
    TokenChunk,
    TokenFrame,
    TurnFinished,
)
from pipeline.record import read_frames
from stages.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, HarmonyEncoding, load_encoding
from stages.parse.harmony import HarmonyParser, TokenDecoder
from tests.stages.persist.samples import response

FIXTURES = Path(__file__).parents[3] / "fixtures" / "harmony"
RECORDINGS = sorted(FIXTURES.glob("*/tokens.jsonl"))


@dataclass
class Parsed:
    """An item as its frames told it."""

    kind: str
    name: str
    deltas: list[str] = field(default_factory=list)
    complete: bool | None = None
    repairs: tuple[Repair, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def items(frames: Iterable[ParsedFrame]) -> list[Parsed]:
    """The items that frames tell of, with the grammar of the junction checked."""
    told: list[Parsed] = []
    for frame in frames:
        is_open = bool(told) and told[-1].complete is None
        match frame:
            case ReasoningOpened() | MessageOpened() | FunctionCallOpened():
                assert not is_open
                name = getattr(frame, "phase", "") or getattr(frame, "name", "")
                told.append(Parsed(type(frame).__name__.removesuffix("Opened"), name))
            case ItemDelta(text):
                assert is_open
                assert text
                told[-1].deltas.append(text)
            case ItemClosed(complete, repairs):
                assert is_open
                told[-1].complete, told[-1].repairs = complete, repairs
            case TurnFinished() | GenerationStarted():
                assert not is_open
    return told


def parse(encoding: HarmonyEncoding, chunks: Iterable[Sequence[int]], reason: FinishReason = "stop") -> list[Parsed]:
    parser = HarmonyParser(encoding)
    frames: list[TokenFrame] = [TokenChunk(tuple(chunk)) for chunk in chunks if chunk]
    return items(
        parsed for frame in [*frames, GenerationFinished(reason, 0, 0.0)] for parsed in list(parser.feed(frame))
    )


def parse_text(encoding: HarmonyEncoding, text: str, reason: FinishReason = "stop") -> list[Parsed]:
    return parse(encoding, ([token] for token in encoding.encode_markup(text)), reason)


def summary(told: list[Parsed]) -> list[tuple[object, ...]]:
    return [(item.kind, item.name, item.text, item.complete, item.repairs) for item in told]


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


@given(st.text(min_size=1, max_size=400), st.sampled_from(["", "<|channel|>final ", "<|channel|>analysis "]))
@settings(max_examples=100, deadline=None)
def test_text_without_its_marker_is_kept(text: str, header: str) -> None:
    """A message whose ``<|message|>`` is missing keeps every word that is no header word."""
    encoding = load_encoding()
    words = [f"w{ord(letter):x}w" for letter in text]
    tokens = encoding.encode_markup(header) + encoding.encode(" ".join(words)) + [RETURN]
    (item,) = parse(encoding, [tokens])
    assert item.text.split() == words
    assert item.complete


def words(least: int) -> st.SearchStrategy[list[str]]:
    """No words, or at least so many of them, up to far more than a header can hold."""
    word = st.integers(0, 0xFFFF).map(lambda number: f"w{number:x}w")
    return st.one_of(st.just([]), st.lists(word, min_size=least, max_size=80))


@given(
    st.sampled_from(["", "<|start|>assistant ", "<|start|>"]),
    words(2),
    st.sampled_from(["", "<|channel|>analysis ", "<|channel|>commentary ", "<|channel|>final ", "<|channel|>"]),
    words(2),
    st.sampled_from(["", "<|constrain|>"]),
    words(1),
)
@settings(max_examples=200, deadline=None)
def test_text_in_a_header_is_kept(
    start: str, ahead: list[str], channel: str, behind: list[str], constrain: str, content: list[str]
) -> None:
    """Two words or more are text, wherever they stand in a header: all of it comes out, in order."""
    header = f"{start}{' '.join(ahead)}{channel}{' '.join(behind)}{constrain}"
    told = parse_text(load_encoding(), f"{header}<|message|>{' '.join(content)}<|return|>")
    joined = "".join(item.text for item in told)
    assert "".join(joined.split()) == "".join([*ahead, *behind, *content])


@given(
    st.sampled_from(["analysis", "commentary", "final", "assistant", "user", "system:x", "json"]),
    st.text(min_size=1, max_size=100),
)
@settings(max_examples=100, deadline=None)
def test_a_text_may_begin_with_a_header_word(first: str, text: str) -> None:
    """Without any markup there is no header: its words are those of an answer."""
    answer = " ".join([first, *(f"w{ord(letter):x}w" for letter in text)])
    (item,) = parse_text(load_encoding(), f"{answer}<|return|>")
    assert (item.kind, item.name, item.text) == ("Message", "final_answer", answer)


@pytest.mark.parametrize("noise", ["junk", "??", "––commentary", "analysis commentary", "–– ? 42"])
def test_a_single_word_in_a_header_is_noise(noise: str, encoding: HarmonyEncoding) -> None:
    """What is left over of a header in one word, or in header words only, is no text."""
    told = parse_text(encoding, f"<|channel|>commentary {noise}<|message|>one<|end|>")
    assert summary(told) == [("Message", "commentary", "one", True, ("unexpected header",))]


def test_signs_without_spaces_are_words(encoding: HarmonyEncoding) -> None:
    """Chinese text in a header is text, though it has no spaces."""
    told = parse_text(encoding, "<|channel|>final答案是四十二<|message|>是<|return|>")
    assert [item.text for item in told] == ["答案是四十二 是"]


@pytest.mark.parametrize(
    "layout", ["<|channel|>commentary to={} <|constrain|>json", " to={}<|channel|>commentary json"]
)
@pytest.mark.parametrize(
    "name", ["functions." + "0123456789abcdef" * 4, "functions." + "a1" * 32, "functions." + "_7Q" * 21]
)
def test_the_longest_name_is_a_name(layout: str, name: str, encoding: HarmonyEncoding) -> None:
    """A name of 64 characters makes a call, however many tokens it takes."""
    (item,) = parse_text(encoding, f"{layout.format(name)}<|message|>{{}}<|call|>")
    assert (item.kind, item.name, item.text) == ("FunctionCall", name.removeprefix("functions."), "{}")


def test_a_header_of_any_length_ends(encoding: HarmonyEncoding) -> None:
    """One word that goes on for 256 tokens is streamed as well."""
    parser = HarmonyParser(encoding)
    tokens = encoding.encode("a1" * 200)
    frames = [frame for token in tokens[:300] for frame in list(parser.feed(TokenChunk((token,))))]
    assert len([frame for frame in frames if isinstance(frame, ItemDelta)]) > 10


# Functions on offer


def names_called(encoding: HarmonyEncoding, recipient: str, **fields: Any) -> list[tuple[str, str, tuple[Repair, ...]]]:
    """What becomes of a message to ``recipient`` where the function ``weather`` is declared."""
    parser = HarmonyParser(encoding)
    tokens = encoding.encode_markup(f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{{}}<|call|>")
    frames: list[TokenFrame] = [GenerationStarted(response(**fields), (), 0), TokenChunk(tuple(tokens))]
    told = items(parsed for frame in frames for parsed in list(parser.feed(frame)))
    return [(item.kind, item.name, item.repairs) for item in told]


@pytest.mark.parametrize("recipient", ["functions.weather", "weather", "functions.other"])
def test_no_call_gets_out_where_calls_are_forbidden(recipient: str, encoding: HarmonyEncoding) -> None:
    """With ``tool_choice`` "none" a call is a thought, whatever it is addressed to."""
    assert names_called(encoding, recipient, tool_choice="none") == [("Reasoning", "", ("undeclared tool",))]


def test_an_undeclared_function_is_called(encoding: HarmonyEncoding) -> None:
    """Where calls are allowed, the client gets to see the name that the model made up."""
    assert names_called(encoding, "functions.other", tools=()) == [("FunctionCall", "other", ())]


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


@pytest.mark.parametrize("place", ["role", "channel"])
@pytest.mark.parametrize("content_type", ["", " json", " <|constrain|>json", "<|constrain|>json", " code"])
@pytest.mark.parametrize("channel", ["analysis", "commentary", "final"])
def test_the_recipient_decides(place: str, content_type: str, channel: str, encoding: HarmonyEncoding) -> None:
    """A call is a call on every channel, wherever its recipient stands."""
    recipient = " to=functions.f"
    role, behind = (recipient, "") if place == "role" else ("", recipient)
    (item,) = parse_text(encoding, f"{role}<|channel|>{channel}{behind}{content_type}<|message|>{{}}<|call|>")
    assert summary([item]) == [("FunctionCall", "f", "{}", True, ())]
