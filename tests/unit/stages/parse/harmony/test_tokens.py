"""The tokens of an item, which a continued conversation is rendered from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import FinishReason, GenerationFinished
from penstock.stages.models.harmony.vocabulary import END, RETURN, START, HarmonyEncoding, load_encoding
from tests.support import parsed_output
from tests.support.examples import examples
from tests.support.harmony import wellformed_completions

THOUGHT = "<|channel|>analysis<|message|>Hm, é 👩‍🚀<|end|>"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|>"
CALLED = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
CALLED_AHEAD = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
ANSWER = "<|channel|>final<|message|><|return|>"
NEXT = "<|start|>assistant"


def joined(parsed: list[parsed_output.ParsedItem]) -> list[int]:
    """The tokens of a turn, from those of its items."""
    between = load_encoding().encode_markup(NEXT)
    return [token for item in parsed for token in (*between, *item.token_ids)][len(between) :]


@pytest.mark.parametrize("last", [CALLED, CALLED_AHEAD, ANSWER])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_items_have_all_tokens_of_a_turn(last: str, size: int, encoding: HarmonyEncoding) -> None:
    messages = [THOUGHT, PREAMBLE, last]
    tokens = encoding.encode_markup(NEXT.join(messages))
    parsed = parsed_output.parse_harmony(encoding, (tokens[at : at + size] for at in range(0, len(tokens), size)))
    assert [encoding.decode(item.token_ids) for item in parsed] == messages
    assert joined(parsed) == tokens


@given(wellformed_completions(), st.data())
def test_any_well_formed_turn_keeps_its_tokens(completion: str, data: st.DataObject) -> None:
    tokens = load_encoding().encode_markup(completion)
    cuts = data.draw(st.sets(st.integers(0, len(tokens))))
    parsed = parsed_output.parsed_items(
        parsed_output.parse_harmony_frames(
            load_encoding(), [*parsed_output.cut_chunks(tokens, cuts, likely=False), GenerationFinished("stop", 0, 0.0)]
        )
    )
    assert joined(parsed) == tokens


def test_tokens_keep_their_spelling(encoding: HarmonyEncoding) -> None:
    letters = [token for letter in "Hello there" for token in encoding.encode(letter)]
    tokens = [*encoding.encode_markup("<|channel|>final<|message|>"), *letters, RETURN]
    (item,) = parsed_output.parse_harmony(encoding, [tokens])
    assert item.text == "Hello there"
    assert item.token_ids == tuple(tokens)


@pytest.mark.parametrize("reason", ["length", "cancelled", "stop"])
def test_truncated_item_has_no_tokens(reason: FinishReason, encoding: HarmonyEncoding) -> None:
    """An item at a limit or a stop string might have ended otherwise."""
    parsed = parsed_output.parse_harmony_text(encoding, f"{THOUGHT}{NEXT}<|channel|>final<|message|>Hel", reason)
    assert [bool(item.token_ids) for item in parsed] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        f"<|channel|>analysis<|message|>No end{NEXT}{ANSWER}",
        f"<|channel|>analysis<|message|>No <|constrain|>place for that<|end|>{NEXT}{ANSWER}",
        f"<|message|>No channel<|end|>{NEXT}{ANSWER}",
        f"<|channel|>final No message<|end|>{NEXT}{ANSWER}",
        f"Two words<|channel|>analysis<|message|>ahead<|end|>{NEXT}{ANSWER}",
        f"<|channel|>analysis two words<|message|>behind<|end|>{NEXT}{ANSWER}",
        f"<|channel|>commentary to=python<|message|>1<|call|>{NEXT}{ANSWER}",
        f"{NEXT}user<|message|>Somebody else<|end|>{NEXT}{ANSWER}",
    ],
)
def test_repaired_item_has_no_tokens(text: str, encoding: HarmonyEncoding) -> None:
    """The model must not read wrong markup again; items beside it keep theirs."""
    *broken, answer = parsed_output.parse_harmony_text(encoding, text, tools=parsed_output.CLIENT_TOOLS)
    assert broken
    assert all(item.repairs and not item.token_ids for item in broken)
    assert encoding.decode(answer.token_ids) == ANSWER


def test_role_in_other_tokens_has_none(encoding: HarmonyEncoding) -> None:
    """A prompt could not continue after such a role with the same tokens."""
    role = [*encoding.encode("assist"), *encoding.encode("ant")]
    tokens = [*encoding.encode_markup(THOUGHT), START, *role, *encoding.encode_markup(ANSWER)]
    parsed = parsed_output.parse_harmony(encoding, [tokens])
    assert [(item.kind, bool(item.token_ids)) for item in parsed] == [("Reasoning", True), ("Message", False)]


def test_repeated_end_belongs_to_no_item(encoding: HarmonyEncoding) -> None:
    tokens = [*encoding.encode_markup(THOUGHT), END, END, *encoding.encode_markup(NEXT + ANSWER)]
    assert [encoding.decode(item.token_ids) for item in parsed_output.parse_harmony(encoding, [tokens])] == [
        THOUGHT,
        ANSWER,
    ]


@given(parsed_output.any_harmony_tokens())
@examples(300)
def test_tokens_of_an_item_parse_to_that_item(tokens: list[int]) -> None:
    begun = parsed_output.turn_started(tools=parsed_output.CLIENT_TOOLS)
    finished = GenerationFinished("stop", 0, 0.0)
    for item in parsed_output.parsed_items(
        parsed_output.parse_harmony_frames(
            load_encoding(), [begun, *parsed_output.cut_chunks(tokens, (), likely=False), finished]
        )
    ):
        if item.token_ids:
            assert (item.complete, item.repairs) == (True, ())
            assert parsed_output.joined_deltas(
                parsed_output.parse_harmony(load_encoding(), [item.token_ids], tools=parsed_output.CLIENT_TOOLS)
            ) == parsed_output.joined_deltas([item])
