"""Logprobs: aligned with the text of a message, exact in bytes, and for nothing but that text."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import GenerationFinished, ItemDelta, TokenChunk, TokenFrame, TokenLogprob
from penstock.pipeline.protocol.items import Logprob, TopLogprob
from penstock.stages.models.harmony.vocabulary import RETURN, HarmonyEncoding, load_encoding
from tests.support.examples import examples
from tests.support.parsed_output import ParsedItem, parse_harmony_frames, parsed_items, turn_started

FINAL = "<|channel|>final<|message|>"
ASTRONAUT = "👩‍🚀"


def likely(tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """A logprob for each token, all of them different."""
    return tuple(TokenLogprob(-position / 8, ((token, -position / 8),)) for position, token in enumerate(tokens))


def parse_likely(
    encoding: HarmonyEncoding, tokens: Sequence[int], size: int = 1, stop: tuple[str, ...] = ()
) -> list[ParsedItem]:
    logprobs = likely(tokens)
    chunks: list[TokenFrame] = [
        TokenChunk(tuple(tokens[at : at + size]), logprobs[at : at + size]) for at in range(0, len(tokens), size)
    ]
    return parsed_items(
        parse_harmony_frames(
            encoding, [turn_started(stop=stop, logprobs=0), *chunks, GenerationFinished("stop", 0, 0.0)]
        )
    )


def spelled(logprobs: Sequence[Logprob]) -> bytes:
    return b"".join(bytes(logprob.bytes) for logprob in logprobs)


@pytest.mark.defect("B27")
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_only_message_text_has_logprobs(size: int, encoding: HarmonyEncoding) -> None:
    tokens = encoding.encode_markup(
        "<|channel|>analysis<|message|>I think<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
        f"<|start|>assistant{FINAL}Hello there!<|return|>"
    )
    thought, preamble, call, answer = parse_likely(encoding, tokens, size)
    assert (thought.logprobs, call.logprobs) == ([], [])
    for item in (preamble, answer):
        assert [logprob.token for logprob in item.logprobs] == [
            encoding.token_texts[token] for token in encoding.encode(item.text)
        ]
    first = tokens.index(encoding.encode("Hello")[0])
    assert [logprob.logprob for logprob in answer.logprobs] == [-at / 8 for at in range(first, len(tokens) - 1)]


def test_split_character_is_spelled_in_escaped_bytes(encoding: HarmonyEncoding) -> None:
    tokens = [*encoding.encode_markup(FINAL), *encoding.encode("𓀀!"), RETURN]
    (item,) = parse_likely(encoding, tokens)
    assert item.deltas == ["𓀀", "!"]
    *parts, last = item.logprobs
    assert "".join(part.token for part in parts) == "".join(f"\\x{byte:02x}" for byte in "𓀀".encode())
    assert (last.token, last.bytes) == ("!", (33,))
    assert spelled(item.logprobs) == item.text.encode()


def test_logprobs_come_with_their_text(encoding: HarmonyEncoding) -> None:
    tokens = [*encoding.encode_markup(FINAL), *encoding.encode(f"One {ASTRONAUT}, two 𓀀."), RETURN]
    frames = [TokenChunk((token,), (TokenLogprob(-0.5),)) for token in tokens]
    text, spelling = "", b""
    for frame in parse_harmony_frames(encoding, [turn_started(logprobs=0), *frames]):
        if isinstance(frame, ItemDelta):
            text, spelling = text + frame.text, spelling + spelled(frame.logprobs)
            assert spelling.decode(errors="ignore") == text
    assert spelling == text.encode()


def test_token_across_two_deltas_comes_with_the_first(encoding: HarmonyEncoding) -> None:
    """Each delta has logprobs: clients match them with its text."""
    space, rest = encoding.encode(" 🎉")
    assert encoding.token_bytes[space] == b" \xf0\x9f\x8e"
    frames = [TokenChunk((token,), (TokenLogprob(-0.5),)) for token in (*encoding.encode_markup(FINAL), space, rest)]
    deltas = [
        frame
        for frame in parse_harmony_frames(encoding, [turn_started(logprobs=0), *frames])
        if isinstance(frame, ItemDelta)
    ]
    assert [(delta.text, spelled(delta.logprobs)) for delta in deltas] == [
        (" ", b" \xf0\x9f\x8e"),
        ("🎉", b"\x89"),
    ]


def test_alternatives_may_be_any_tokens(encoding: HarmonyEncoding) -> None:
    part = encoding.encode("𓀀")[0]
    top = ((RETURN, -0.25), (part, -1.5), (200_050, -3.0), (13, -inf))
    chunk = TokenChunk((13,), (TokenLogprob(-inf, top),))
    header = TokenChunk(tuple(encoding.encode_markup(FINAL)), (TokenLogprob(0.0),) * 3)
    *_, delta = parse_harmony_frames(encoding, [turn_started(logprobs=0), header, chunk])
    raw = encoding.token_bytes[part]
    assert delta == ItemDelta(
        ".",
        (
            Logprob(
                ".",
                (46,),
                -9999.0,
                (
                    TopLogprob("<|return|>", tuple(b"<|return|>"), -0.25),
                    TopLogprob("".join(f"\\x{byte:02x}" for byte in raw), tuple(raw), -1.5),
                    TopLogprob("<|reserved_200050|>", tuple(b"<|reserved_200050|>"), -3.0),
                    TopLogprob(".", (46,), -9999.0),
                ),
            ),
        ),
    )


def test_recovered_text_has_no_logprobs(encoding: HarmonyEncoding) -> None:
    (item,) = parse_likely(encoding, encoding.encode_markup("<|channel|>final so then<|message|>one two<|return|>"))
    assert item.text == "so then one two"
    assert spelled(item.logprobs) == b"one two"


def test_unfinished_character_keeps_its_logprobs(encoding: HarmonyEncoding) -> None:
    part = encoding.encode("𓀀")[0]
    (item,) = parse_likely(encoding, [*encoding.encode_markup(FINAL), 40, part, RETURN])
    assert item.text == "I�"
    assert spelled(item.logprobs) == b"I" + encoding.token_bytes[part]


@given(st.text(max_size=30), st.text(min_size=1, max_size=3), st.integers(1, 50))
@examples(200)
def test_logprobs_spell_the_text(text: str, stop: str, size: int) -> None:
    encoding = load_encoding()
    tokens = [*encoding.encode_markup(FINAL), *encoding.encode(text), RETURN]
    (item,) = parse_likely(encoding, tokens, size)
    assert spelled(item.logprobs) == item.text.encode() == text.encode()
    (item,) = parse_likely(encoding, tokens, size, stop=(stop,))
    assert item.text == text.partition(stop)[0]
    spelling = spelled(item.logprobs)
    assert item.text.startswith(spelling.decode(errors="ignore"))
    assert item.logprobs == parse_likely(encoding, tokens, stop=(stop,))[0].logprobs
    if stop not in text:
        assert spelling == text.encode()
