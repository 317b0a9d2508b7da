"""Recordings without texts: they have no readable word, and replay the same items."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import frames
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.recordings.format import FILES, line, read_frames
from penstock.pipeline.recordings.masking import mask
from penstock.pipeline.recordings.redaction import without_secrets
from penstock.pipeline.secret import unread
from penstock.stages.models.harmony.token_masking import HarmonyWords, WithoutTexts, harmony_words
from penstock.stages.models.harmony.vocabulary import MESSAGE, RETURN, HarmonyEncoding
from penstock.stages.parse.harmony.parse import ParseHarmony
from tests.support.event_streams import run_stage
from tests.support.fixture_cases import HARMONY_CASES
from tests.support.stored_responses import facts

SPELLED = frozenset(
    {
        "type",
        "object",
        "status",
        "tool_choice",
        "truncation",
        "service_tier",
        "role",
        "form",
        "choice",
        "execution",
        "reason",
        "phase",
    }
    | {"repairs", "mode", "include", "effort", "channel", "summary", "verbosity", "date", "calls", "code", "detail"}
    | {"syntax", "require_approval", "search_context_size", "reasoning_effort", "callers"}
)
"""The keys whose values are words of the protocol."""

NAMES = frozenset(
    {"id", "item_id", "call_id", "caller_id", "container_id", "approval_request_id", "model", "name", "namespace"}
    | {"allowed", "server_label", "label", "caller", "fingerprint"}
)

WITHOUT_NAME = {"call_unknown_function"}
"""Cases with a call of an undeclared function: its name is text of the model, and is redacted."""


def words(masked: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each word of at least four letters with its key, except words that are redacted to x's."""
    match masked:
        case dict():
            for name, value in masked.items():
                yield from words(value, name)
        case list():
            for value in masked:
                yield from words(value, key)
        case str():
            yield from ((key, word) for word in re.findall(r"[^\W\d_]{4,}", masked) if set(word) != {"x"})
        case _:
            pass


def redacted(folder: Path, stage: str, redaction: WithoutTexts) -> list[Any]:
    """The redacted frames of a recorded file."""
    name, junction = FILES[stage]
    return [masked for frame in read_frames(folder / name, junction) for masked in redaction.frames(stage, frame)]


@pytest.mark.parametrize("folder", HARMONY_CASES, ids=lambda folder: folder.name)
@pytest.mark.parametrize("words_of", [harmony_words, None], ids=["harmony", "chat"])
def test_no_word_survives(folder: Path, words_of: Any) -> None:
    redaction = WithoutTexts(words_of)
    for stage, (name, junction) in FILES.items():
        for frame in redacted(folder, stage, redaction) if (folder / name).exists() and redaction.keeps(stage) else ():
            written = line(without_secrets(frame) if hasattr(frame, "facts") or hasattr(frame, "response") else frame)
            assert {key for key, _ in words(json.loads(written))} <= SPELLED | NAMES | {"url"}
            assert b"https" not in written
            msgspec.json.decode(written, type=junction, dec_hook=unread)


@pytest.mark.parametrize("folder", HARMONY_CASES, ids=lambda folder: folder.name)
async def test_replay_has_the_same_items(folder: Path, encoding: HarmonyEncoding) -> None:
    masked = redacted(folder, "generate", WithoutTexts(harmony_words))
    before = await run_stage(ParseHarmony(encoding), read_frames(folder / "tokens.jsonl", frames.TokenFrame))
    after = await run_stage(ParseHarmony(encoding), masked)
    assert kinds(after, folder) == kinds(before, folder)


def kinds(recorded: list[Any], folder: Path) -> list[Any]:
    """The frames of a stream in brief; the number of deltas of an item does not matter."""
    found: list[Any] = []
    for frame in recorded:
        match frame:
            case frames.ItemDelta():
                found += [frames.ItemDelta] if found[-1] != frames.ItemDelta else []
            case frames.ItemClosed(complete, repairs):
                found.append((complete, set(repairs) - {"wrapped input"}))  # the words around that input are redacted
            case frames.FunctionCallOpened(name, namespace) if folder.name not in WITHOUT_NAME:
                found.append((name, namespace))
            case _:
                found.append(type(frame))
    return found


@given(text=st.text(max_size=200), data=st.data())
def test_redacted_tokens_spell_the_shape_of_their_text(
    encoding: HarmonyEncoding, text: str, data: st.DataObject
) -> None:
    tokens = [MESSAGE, *encoding.encode(text), RETURN]
    machine, written = HarmonyWords(encoding), list[int]()
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        written += machine.feed(tokens[:count])
        tokens = tokens[count:]
    assert (written[0], written[-1], machine.finish()) == (MESSAGE, RETURN, [])
    assert encoding.decode(written[1:-1]) == mask(text)


@given(words_of_text=st.lists(st.from_regex(r"\A ?[b-wyzB-WYZ]{4,9}[.,]?\Z"), max_size=80))
def test_text_outside_messages_is_redacted(encoding: HarmonyEncoding, words_of_text: list[str]) -> None:
    machine = HarmonyWords(encoding, ["get_weather"])
    written = encoding.decode([*machine.feed(encoding.encode(" ".join(words_of_text))), *machine.finish()])
    known = {"system", "developer", "user", "tool", "json", "code", "functions", "comm", "comme", "commen", "fina"}
    assert {word for _, word in words(written)} <= known


@given(st.text())
def test_shape_keeps_length_and_punctuation(text: str) -> None:
    masked = mask(text)
    assert (len(masked), mask(masked)) == (len(text), masked)
    for words_of_text, shown in zip(text, masked, strict=True):
        assert shown == words_of_text or (shown == "x" and not words_of_text.isspace()) or shown == "0"


def test_similar_names_do_not_slow_redaction(encoding: HarmonyEncoding) -> None:
    """A request cannot keep the writer thread busy by the names of its tools."""
    machine = HarmonyWords(encoding, ["a" * length for length in range(1, 60)])
    machine.feed(encoding.encode("a" * 190 + "!"))
    assert machine.finish()


def test_weights_are_left_out_as_they_count_other_tokens() -> None:
    redaction = WithoutTexts(harmony_words)
    list(redaction.frames("generate", frames.GenerationStarted(facts(), prompt_tokens=1)))
    finished = frames.GenerationFinished("stop", 0, 0.0, weights=(WeightSpan("one", 0, 7),))
    assert list(redaction.frames("generate", finished)) == [frames.GenerationFinished("stop", 0, 0.0)]


def test_chat_tokens_are_left_out() -> None:
    redaction = WithoutTexts(None)
    assert [stage for stage in FILES if redaction.keeps(stage)] == ["normalize", "parse", "converse", "emit", "persist"]
    folder = next(case for case in HARMONY_CASES if case.name == "function_call_result")
    for stage in ("normalize", "parse", "emit"):
        for frame in redacted(folder, stage, redaction):
            assert not isinstance(frame, frames.ItemTokens | frames.TokenChunk)
            assert not getattr(frame, "token_ids", ())
            assert not isinstance(frame, frames.ResolvedRequest) or not any(frame.tokens.values())
