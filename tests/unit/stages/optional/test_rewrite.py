"""The machine that rewrites the model's text by patterns."""

from __future__ import annotations

import re

import pytest

from penstock.pipeline.frames import (
    FunctionCallOpened,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    RefusalOpened,
)
from penstock.stages.optional.rewrite import Rewriter


def rewritten(held: re.Pattern[str], *pieces: str) -> list[str]:
    """The texts of the rewritten deltas."""
    rewriter = Rewriter(lambda text: text.replace("SECRET", "[]").replace("secret", "[]"), held)
    frames: list[ParsedFrame] = [MessageOpened("final_answer"), *map(ItemDelta, pieces), ItemClosed(complete=True)]
    given = [rewritten for frame in frames for rewritten in rewriter.feed(frame)]
    return [frame.text for frame in given if isinstance(frame, ItemDelta)]


@pytest.mark.parametrize(
    "held",
    [
        re.compile("[a-z]+", re.IGNORECASE),
        re.compile("(?i)[a-z]+"),
        re.compile("[a-z]+  # a word", re.IGNORECASE | re.VERBOSE),
        re.compile("(?ix) [a-z]+  # a word"),
        re.compile("[a-z]|[a-zA-Z]+"),
        re.compile("(?m)^[a-zA-Z]+$"),
    ],
)
def test_any_pattern_may_hold_text(held: re.Pattern[str]) -> None:
    assert rewritten(held, "SEC", "RET", " 1") == ["[] 1"]


@pytest.mark.parametrize("opened", [MessageOpened(), ReasoningOpened(), RefusalOpened()])
def test_text_is_rewritten_but_no_arguments_of_calls(opened: ParsedFrame) -> None:
    for first, text in ((opened, "A"), (FunctionCallOpened("call_1", "f"), "a")):
        rewriter = Rewriter(str.upper, re.compile("x"))
        assert list(rewriter.feed(first)) == [first]
        assert list(rewriter.feed(ItemDelta("a"))) == [ItemDelta(text)]


def test_held_text_belongs_to_its_item() -> None:
    rewriter = Rewriter(str.upper, re.compile("[a-z]+"))
    frames: list[ParsedFrame] = [
        MessageOpened("final_answer"),
        ItemDelta("ab"),
        ItemClosed(complete=True, token_ids=(1,)),
    ]
    given = [rewritten for frame in [*frames, *frames] for rewritten in rewriter.feed(frame)]
    assert given == 2 * [MessageOpened("final_answer"), ItemDelta("AB"), ItemClosed(complete=True, token_ids=())]


def test_only_an_unchanged_item_keeps_its_tokens() -> None:
    rewriter = Rewriter(lambda text: text.replace("a", "b"), re.compile("x"))
    for texts, token_ids in ((("c", "d"), (1,)), (("a", "d"), ())):
        frames: list[ParsedFrame] = [
            MessageOpened("final_answer"),
            *map(ItemDelta, texts),
            ItemClosed(complete=True, token_ids=(1,)),
        ]
        *_, closed = [rewritten for frame in frames for rewritten in rewriter.feed(frame)]
        assert closed == ItemClosed(complete=True, token_ids=token_ids)
