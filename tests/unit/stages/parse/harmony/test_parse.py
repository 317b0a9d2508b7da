"""The Harmony parser as a machine; whole malformed streams are in ``fixtures/harmony``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai_harmony import Role

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import (
    Channel,
    FinishReason,
    FunctionCallOpened,
    GenerationFinished,
    GenerationStarted,
    ItemDelta,
    ParsedFrame,
    TokenChunk,
    TokenFrame,
    TurnFinished,
    with_sampling,
)
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.harmony.vocabulary import (
    CALL,
    CHANNEL,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyEncoding,
    load_encoding,
)
from penstock.stages.parse.harmony.parse import HarmonyParser
from penstock.stages.parse.text import TokenDecoder
from tests.support.examples import examples
from tests.support.harmony import reference_encoding, wellformed_completions
from tests.support.parsed_output import (
    EVERY_TOOL,
    any_harmony_tokens,
    any_turn_start,
    counted_tokens,
    cut_chunks,
    joined_deltas,
    parse_harmony,
    parse_harmony_frames,
    parse_harmony_slowly,
    parse_harmony_text,
    parsed_items,
    turn_started,
)
from tests.support.paths import HARMONY

RECORDINGS = sorted(HARMONY.glob("*/tokens.jsonl"))


# Any chunking


def chunked(frames: list[TokenFrame], size: int) -> list[TokenFrame]:
    """A recording in chunks of another size; it may be of several generations."""
    cut: list[TokenFrame] = []
    for is_text, some in groupby(frames, lambda frame: isinstance(frame, TokenChunk)):
        kept = list(some)
        cut += _chunks([frame for frame in kept if isinstance(frame, TokenChunk)], size) if is_text else kept
    return cut


def _chunks(chunks: list[TokenChunk], size: int) -> Iterator[TokenChunk]:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    for at in range(0, len(tokens), size):
        yield TokenChunk(tuple(tokens[at : at + size]), tuple(logprobs[at : at + size]))


@pytest.mark.defect("9")
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("size", [2, 5, 1000])
def test_chunks_do_not_change_the_items(recording: Path, size: int, encoding: HarmonyEncoding) -> None:
    frames = list(read_frames(recording, TokenFrame))
    larger, single = (
        parse_harmony_frames(encoding, chunked(frames, size)),
        parse_harmony_frames(encoding, chunked(frames, 1)),
    )
    assert joined_deltas(parsed_items(larger)) == joined_deltas(parsed_items(single))
    assert larger[-1] == single[-1]


@pytest.mark.defect("9")
@given(wellformed_completions(), st.data())
def test_no_token_is_lost_or_scrambled(completion: str, data: st.DataObject) -> None:
    tokens = load_encoding().encode_markup(completion)
    cuts = data.draw(st.sets(st.integers(0, len(tokens))))
    parsed = parsed_items(
        parse_harmony_frames(
            load_encoding(), [*cut_chunks(tokens, cuts, likely=False), GenerationFinished("stop", 0, 0.0)]
        )
    )
    theirs = reference_encoding().parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    assert ["".join(item.deltas) for item in parsed] == [message.to_dict()["content"][0]["text"] for message in theirs]


CALLS = [
    f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}<|call|>"
    for arguments in ('{"a":1}', "{}", '{"é":"👩‍🚀"}')
]


@pytest.mark.defect("8")
@pytest.mark.parametrize("size", range(1, 17))
def test_several_calls_may_come_in_one_chunk(size: int, encoding: HarmonyEncoding) -> None:
    tokens = encoding.encode_markup("<|start|>assistant".join(CALLS))
    parsed = parse_harmony(encoding, (tokens[at : at + size] for at in range(0, len(tokens), size)))
    assert [(item.kind, item.text) for item in parsed] == [
        ("FunctionCall", '{"a":1}'),
        ("FunctionCall", "{}"),
        ("FunctionCall", '{"é":"👩‍🚀"}'),
    ]


@pytest.mark.defect("10")
@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("behind", range(4))
def test_text_beside_a_boundary_is_kept(before: int, behind: int, encoding: HarmonyEncoding) -> None:
    thought, answer = encoding.encode(" one two three four"), encoding.encode(" five six seven eight")
    boundary = encoding.encode_markup("<|end|><|start|>assistant<|channel|>final<|message|>")
    tokens = [*encoding.encode_markup("<|channel|>analysis<|message|>"), *thought, *boundary, *answer, RETURN]
    at = tokens.index(boundary[0])
    cuts = [0, at - before, at + len(boundary) + behind, len(tokens)]
    parsed = parse_harmony(encoding, (tokens[start:end] for start, end in pairwise(cuts)))
    assert [item.text for item in parsed] == [" one two three four", " five six seven eight"]


@pytest.mark.defect("B8")
def test_chunk_that_opens_an_item_may_have_its_text(encoding: HarmonyEncoding) -> None:
    tokens = encoding.encode_markup('<|channel|>commentary to=functions.f<|message|>{"a"')
    opened, delta = parse_harmony_frames(encoding, [TokenChunk(tuple(tokens))])
    assert (opened, delta) == (FunctionCallOpened("f"), ItemDelta('{"a"'))


@pytest.mark.defect("B32")
def test_split_characters_in_arguments_are_joined(encoding: HarmonyEncoding) -> None:
    tokens = encoding.encode_markup(CALLS[2])
    assert len(tokens) > len(encoding.encode_markup(CALLS[1])) + 5
    (item,) = parse_harmony(encoding, ([token] for token in tokens))
    assert all(item.deltas)
    assert item.text == '{"é":"👩‍🚀"}'


@pytest.mark.defect("B33")
def test_preamble_is_streamed(encoding: HarmonyEncoding) -> None:
    preamble = "<|channel|>commentary<|message|>I will look it up.<|end|><|start|>assistant"
    parsed = parse_harmony(encoding, ([token] for token in encoding.encode_markup(preamble + CALLS[0])))
    assert [(item.kind, item.name) for item in parsed] == [("Message", "commentary"), ("FunctionCall", "f")]
    assert parsed[0].deltas == ["I", " will", " look", " it", " up", "."]


@pytest.mark.defect("B35")
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_markup_of_calls_is_no_text(size: int, encoding: HarmonyEncoding) -> None:
    text = "<|channel|>final<|message|>So.<|end|><|start|>assistant" + "<|start|>assistant".join(CALLS)
    tokens = encoding.encode_markup(text)
    parsed = parse_harmony(encoding, (tokens[at : at + size] for at in range(0, len(tokens), size)))
    assert not any(word in item.text for item in parsed for word in ("functions", "commentary", "json", "assistant"))
    assert [item.kind for item in parsed] == ["Message", "FunctionCall", "FunctionCall", "FunctionCall"]


# Any tokens


@pytest.mark.defect("26")
@given(
    any_harmony_tokens(), st.sampled_from(["stop", "length", "cancelled"]), any_turn_start(), st.booleans(), st.data()
)
@examples(300)
def test_any_tokens_give_items(
    tokens: list[int], reason: FinishReason, begun: GenerationStarted, likely: bool, data: st.DataObject
) -> None:
    cuts, wants = data.draw(st.sets(st.integers(0, len(tokens)))), data.draw(st.booleans())
    begun = with_sampling(begun, logprobs=0 if wants else None)
    finished = GenerationFinished(reason, 0, 0.0)
    drawn, single = (
        parse_harmony_frames(load_encoding(), [begun, *cut_chunks(tokens, some, likely=likely), finished])
        for some in (cuts, range(len(tokens)))
    )
    assert joined_deltas(parsed_items(drawn)) == joined_deltas(parsed_items(single))
    assert drawn[-1] == single[-1]


@given(any_harmony_tokens(), any_turn_start(), st.booleans(), st.data())
@examples(200)
def test_hot_path_equals_slow_path(
    tokens: list[int], begun: GenerationStarted, likely: bool, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=20))
    frames: list[TokenFrame] = [begun, *cut_chunks(tokens, cuts, likely=likely), GenerationFinished("stop", 0, 0.0)]
    assert parse_harmony_frames(load_encoding(), frames) == parse_harmony_slowly(load_encoding(), frames)


@given(any_harmony_tokens(), any_turn_start(), st.data())
@examples(200)
def test_tokens_are_counted_before_the_end(tokens: list[int], begun: GenerationStarted, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=20))
    parser = HarmonyParser(load_encoding(), begun)
    assert len(set(counted_tokens(parser, cut_chunks(tokens, cuts, likely=False)))) == 1


@pytest.mark.defect("26")
@given(any_harmony_tokens(), st.booleans())
@examples(300)
def test_content_is_kept_and_markers_are_not(tokens: list[int], likely: bool) -> None:
    encoding = load_encoding()
    frames = parse_harmony_frames(
        encoding, [*cut_chunks(tokens, (), likely=likely), GenerationFinished("stop", 0, 0.0)]
    )
    parsed = [item.text for item in parsed_items(frames) if "missing message" not in item.repairs]
    for text, content in zip(parsed, contents(encoding, tokens), strict=True):
        assert text.endswith(content)


def contents(encoding: HarmonyEncoding, tokens: Iterable[int]) -> list[str]:
    """The texts between each ``<|message|>`` and the next marker that ends a message."""
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
@examples(200)
def test_decoder_joins_split_characters(tokens: list[int]) -> None:
    encoding = load_encoding()
    decoder = TokenDecoder(encoding)
    text = "".join([*map(decoder.decode, tokens), decoder.flush()])
    assert text == b"".join(encoding.token_bytes[token] for token in tokens).decode(errors="replace")


# Agreement with the package


@given(wellformed_completions())
def test_well_formed_output_agrees_with_openai_harmony(completion: str) -> None:
    encoding = load_encoding()
    tokens = encoding.encode_markup(completion)
    theirs = [
        message.to_dict()
        for message in reference_encoding().parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    ]
    kinds = {
        "analysis": ("Reasoning", ""),
        "commentary": ("Message", "commentary"),
        "final": ("Message", "final_answer"),
    }
    assert [(item.kind, item.name, item.text) for item in parse_harmony(encoding, [tokens])] == [
        (*(("FunctionCall", "f") if "recipient" in message else kinds[message["channel"]]), content["text"])
        for message in theirs
        for content in message["content"]
    ]


# Interrupted generation

CUT: tuple[FinishReason, ...] = ("length", "cancelled")

CALLED = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
NEXT = "<|end|><|start|>assistant"
BROKEN_OFF = {
    "a call": '<|channel|>commentary to=functions.f json<|message|>{"a": "x',
    "a second call": f"{CALLED}{NEXT}{CALLED}",
    "behind a call": f"{CALLED}<|end|>",
    "ahead of a second call": f"{CALLED}{NEXT} to=functions",
    "a header": "<|channel|>commentary",
    "a thought": "<|channel|>analysis<|message|>Hm.",
    "a preamble": "<|channel|>commentary<|message|>I will look.",
    "nothing at all": "",
}


@pytest.mark.parametrize("text", BROKEN_OFF.values(), ids=BROKEN_OFF)
@pytest.mark.parametrize("end", ["<|return|>", "<|endoftext|>"])
def test_turn_that_its_grammar_does_not_end_has_failed(text: str, end: str, encoding: HarmonyEncoding) -> None:
    parser = HarmonyParser(encoding, turn_started(held_to_grammar=True))
    parsed: list[ParsedFrame] = []
    with pytest.raises(EngineFailed, match="could not hold the model to the grammar"):
        for token in encoding.encode_markup(text + end):
            parsed += parser.feed(TokenChunk((token,)))
    whole = parse_harmony_text(encoding, text + end)
    assert [item.text for item in parsed_items(parsed)] == [item.text for item in whole]
    assert all(item.complete for item in whole)


@pytest.mark.parametrize(
    "text",
    [
        f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>final<|message|><|return|>",
        f"{CALLED}{NEXT}{CALLED}<|call|>",
        "<|channel|>final<|message|>one STOP",
    ],
)
def test_turn_that_its_grammar_ends_is_complete(text: str, encoding: HarmonyEncoding) -> None:
    parsed = parse_harmony_text(encoding, text, stop=("STOP",), held_to_grammar=True)
    assert parsed
    assert all(item.complete for item in parsed)


@pytest.mark.parametrize("text", BROKEN_OFF.values(), ids=BROKEN_OFF)
@pytest.mark.parametrize("reason", CUT)
def test_truncated_turn_is_no_failure(text: str, reason: FinishReason, encoding: HarmonyEncoding) -> None:
    parse_harmony_text(encoding, text, reason, held_to_grammar=True)


@pytest.mark.parametrize("reason", CUT)
def test_truncated_turn_counts_all_tokens_and_its_open_item_is_incomplete(
    reason: FinishReason, encoding: HarmonyEncoding
) -> None:
    tokens = encoding.encode_markup(f"<|channel|>analysis<|message|>one two{NEXT}<|channel|>final<|message|>three four")
    frames = parse_harmony_frames(encoding, [TokenChunk(tuple(tokens)), GenerationFinished(reason, 7, 1.5)])
    assert [(item.text, item.complete) for item in parsed_items(frames)] == [("one two", True), ("three four", False)]
    assert frames[-1] == TurnFinished(reason, 7, len(tokens), 2, 1.5)


HEADERS = [
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "",
]
WIDE_TEXTS = st.text(st.sampled_from("🦩👩\u200d🚀é漢 "), min_size=1, max_size=12)


@given(st.sampled_from(HEADERS), WIDE_TEXTS, st.sampled_from([*CUT, "stop"]), st.integers(1, 3), st.data())
@example(HEADERS[1], "🦩🦩", "length", 1, None)
@example(HEADERS[1], "🦩🦩", "stop", 1, None)
def test_cut_text_ends_before_an_unfinished_character(
    header: str, text: str, reason: FinishReason, size: int, data: st.DataObject | None
) -> None:
    encoding = load_encoding()
    text = f"no, {text}"
    written = encoding.encode(text)
    kept = data.draw(st.integers(0, len(written))) if data else len(written) - 1
    tokens = [*encoding.encode_markup(header), *written[:kept]]
    parsed = parse_harmony(encoding, (tokens[at : at + size] for at in range(0, len(tokens), size)), reason)
    whole_characters = b"".join(encoding.token_bytes[token] for token in written[:kept]).decode(errors="ignore")
    assert "".join(item.text for item in parsed) == whole_characters


# A continued message


@given(st.sampled_from(["analysis", "commentary", "final"]), wellformed_completions(), st.sampled_from([1, 3, 1000]))
def test_continuation_is_read_as_the_rest_of_its_message(channel: Channel, completion: str, size: int) -> None:
    encoding = load_encoding()
    rest = encoding.encode_markup(f" and so on<|end|><|start|>assistant{completion}")
    chunks = [rest[at : at + size] for at in range(0, len(rest), size)]
    whole = [*encoding.encode_markup(f"<|channel|>{channel}<|message|>"), *rest]
    first, *others = joined_deltas(parse_harmony(encoding, [whole]))
    expected = [replace(first, token_ids=()), *others]  # the tokens are not those of a whole message
    assert joined_deltas(parse_harmony(encoding, chunks, channel=channel)) == expected


def test_continuation_that_was_never_begun_is_no_item(encoding: HarmonyEncoding) -> None:
    assert parse_harmony(encoding, [], "length", channel="final") == []


# Counting


def test_all_tokens_and_those_of_reasoning_are_counted(encoding: HarmonyEncoding) -> None:
    parser = HarmonyParser(encoding, turn_started())
    tokens = encoding.encode_markup(
        "<|channel|>analysis<|message|>one two three<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"
    )
    list(parser.feed(TokenChunk(tuple(tokens))))
    *_, finished = parser.feed(GenerationFinished("stop", 7, 1.5))
    assert finished == TurnFinished("stop", 7, len(tokens), 3, 1.5)


@pytest.mark.defect("V8")
@pytest.mark.parametrize("header", ["<|channel|>analysis to=python code", " to=browser.search<|channel|>analysis"])
def test_calls_within_reasoning_are_not_reasoning_tokens(header: str, encoding: HarmonyEncoding) -> None:
    tokens = encoding.encode_markup(
        f"<|channel|>analysis<|message|>one two<|end|><|start|>assistant{header}<|message|>three four<|call|>"
    )
    begun = turn_started(tools=EVERY_TOOL)
    *_, finished = parse_harmony_frames(
        encoding, [begun, TokenChunk(tuple(tokens)), GenerationFinished("stop", 0, 1.5)]
    )
    assert finished == TurnFinished("stop", 0, len(tokens), 2, 1.5)


@given(
    st.lists(st.tuples(any_harmony_tokens(), any_turn_start()), min_size=2, max_size=3),
    st.sampled_from(["stop", "length"]),
)
def test_turns_are_parsed_independently(turns: list[tuple[list[int], GenerationStarted]], reason: FinishReason) -> None:
    encoding, finished = load_encoding(), GenerationFinished(reason, 0, 0.0)
    alone: list[list[TokenFrame]] = [
        [begun, *cut_chunks(tokens, (), likely=False), finished] for tokens, begun in turns
    ]
    apart = [frame for frames in alone for frame in parse_harmony_frames(encoding, frames)]
    assert parse_harmony_frames(encoding, [frame for frames in alone for frame in frames]) == apart
