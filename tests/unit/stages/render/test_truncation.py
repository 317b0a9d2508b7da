"""What is dropped from a conversation that does not fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.frames import Conversation, Prompt
from pipeline.protocol.items import Item
from stages.calls import callers_of
from stages.harmony import load_encoding
from stages.render.harmony import RenderHarmony
from stages.render.truncation import to_drop
from tests.support.harmony_conversations import (
    SAMPLING,
    call,
    code_call,
    conversation,
    custom_call,
    custom_output,
    mcp_call,
    message,
    output,
    reasoning,
    shell_call,
    shell_output,
    web_call,
)

LONG = "word " * 200


async def rendered(asked: Conversation, context_length: int) -> Prompt:
    async def source() -> AsyncIterator[Conversation]:
        yield asked

    async with aclosing(RenderHarmony(load_encoding(), context_length)(source())) as prompts:
        return await anext(prompts)


def dropped(items: list[Item], excess: int) -> list[int]:
    return sorted(to_drop(items, [10] * len(items), excess))


def talk(*names: str) -> list[Item]:
    return [item for name in names for item in (message("user", name), message("assistant", f"{name}!"))]


def test_the_oldest_go_first() -> None:
    """Only as many items go as must."""
    items: list[Item] = [*talk("a", "b"), message("user", "c")]
    assert [dropped(items, excess) for excess in (-5, 0, 1, 10, 11, 999)] == [
        *([], [], [0], [0], [0, 1]),
        [0, 1, 2, 3],
    ]


def test_the_last_thing_that_the_user_said_stays() -> None:
    """So does everything behind it, of whatever size."""
    items: list[Item] = [*talk("a"), message("user", "b"), reasoning("x"), call("f", "{}"), output("1")]
    assert dropped(items, 999) == [0, 1]


def test_instructions_stay() -> None:
    """System and developer messages are never dropped, wherever they stand."""
    items: list[Item] = [
        message("user", "a"),
        message("system", "b"),
        message("developer", "c"),
        *talk("d"),
        message("user", "e"),
    ]
    assert dropped(items, 999) == [0, 3, 4]


def test_a_call_goes_with_its_output() -> None:
    """Calls and outputs are dropped together, even where other items stand between."""
    items: list[Item] = [call("f", "{}", "a"), custom_call("g", "x", "b"), custom_output("2", "b"), output("1", "a")]
    asked = [*items, message("user", "?")]
    assert dropped(asked, 1) == [0, 3]
    assert dropped(asked, 21) == [0, 1, 2, 3]


def test_a_call_that_is_answered_behind_the_last_message_stays() -> None:
    """What the model must read of a call, it can only read beside the call."""
    items: list[Item] = [call("f", "{}"), message("user", "?"), output("1")]
    assert dropped(items, 999) == []


def test_a_call_that_ran_here_is_one_item() -> None:
    """Where the server made a call, it goes with all that was read of it, and with the thinking that led to it."""
    ran: list[Item] = [mcp_call("read"), reasoning("a"), code_call("1", "2"), reasoning("b"), web_call(type="search")]
    assert [dropped([*ran, message("user", "?")], excess) for excess in (1, 11, 31)] == [
        [0],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
    ]
    shell: list[Item] = [
        shell_call("ls"),
        message("user", "?"),
        message("assistant", "!"),
        shell_output({"stdout": "a"}),
    ]
    assert dropped([*shell, message("user", "?")], 1) == [0, 3]


async def test_what_was_read_of_a_call_counts() -> None:
    """An item is as long as all of its messages, and none of them is left alone."""
    asked = conversation(code_call("print(1)", LONG), message("user", "?"), truncation="auto")
    prompt = await rendered(replace(asked, raw_messages=True), len((await rendered(asked, 4096)).token_ids) + 50)
    assert "python" not in load_encoding().decode(prompt.token_ids)
    assert [raw["role"] for raw in prompt.raw_messages or ()] == ["system", "user"]


def test_reasoning_goes_with_what_it_led_to() -> None:
    """Thinking goes with the answer or the call behind it, and no earlier."""
    items: list[Item] = [reasoning("a"), reasoning("b"), call("f", "{}"), output("1"), reasoning("c"), *talk("d")]
    assert dropped(items, 1) == [0, 1, 2, 3]
    assert dropped([*items, message("user", "?")], 41) == [0, 1, 2, 3, 4]


def test_without_a_user_the_last_item_stays() -> None:
    """A conversation that no user began keeps its end."""
    assert dropped([message("assistant", "a"), message("assistant", "b")], 999) == [0]
    assert dropped([], 1) == []


KINDS: Any = {
    "user": lambda: message("user", "?"),
    "answer": lambda: message("assistant", "!"),
    "rule": lambda: message("developer", "#"),
    "thought": lambda: reasoning("..."),
    "call": lambda: call("f", "{}", "a"),
    "output": lambda: output("1", "a"),
    "other call": lambda: custom_call("g", "x", "b"),
    "other output": lambda: custom_output("2", "b"),
    "ran here": lambda: mcp_call("read"),
    "code": lambda: code_call("1", "2"),
    "shell": lambda: shell_call("ls", call_id="c"),
    "shell output": lambda: shell_output({"stdout": "a"}, call_id="c"),
}


@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=12), st.integers(-5, 130))
def test_whole_things_go_and_no_more_than_must(kinds: list[str], excess: int) -> None:
    """Instructions and the end stay, nothing is left half, and what goes is enough unless there is no more."""
    items: list[Item] = [KINDS[kind]() for kind in kinds]
    gone = dropped(items, excess)
    last = max((at for at, kind in enumerate(kinds) if kind == "user"), default=len(kinds) - 1)
    assert all(kinds[at] != "rule" and at < last for at in gone)
    assert len(gone) * 10 >= excess or gone == dropped(items, 9999)
    assert all((answer in gone) == (asked in gone) for answer, asked in callers_of(items).items())


async def test_what_fits_is_left_alone() -> None:
    """With truncation, a conversation that fits reads as without."""
    asked = conversation(*talk("a", "b"), message("user", "c"))
    cut = await rendered(replace(asked, response=replace(asked.response, truncation="auto")), 4096)
    assert cut.token_ids == (await rendered(asked, 4096)).token_ids


async def test_what_does_not_fit_is_dropped() -> None:
    """The prompt leaves room for the answer, and its last message is whole."""
    turns = talk(*(f"{number} {LONG}" for number in range(20)))
    asked = conversation(*turns, message("user", "Last."), instructions="Be brief.", truncation="auto")
    prompt = await rendered(asked, 2048)
    text = load_encoding().decode(prompt.token_ids)
    assert len(prompt.token_ids) + (SAMPLING.max_tokens or 0) <= 2048
    assert len(prompt.token_ids) > 1024
    assert "Be brief." in text
    assert "<|start|>user<|message|>Last.<|end|><|start|>assistant" in text
    assert "0 word" not in text.split("19 word")[0][:1000]
    assert prompt.input == asked.input


async def test_disabled_truncation_drops_nothing() -> None:
    """A conversation that does not fit is left to fail where the request wants that."""
    asked = conversation(*talk(*([LONG] * 20)), message("user", "Last."))
    assert len((await rendered(asked, 2048)).token_ids) > 2048


async def test_a_greedy_limit_leaves_half_the_context() -> None:
    """A client that wants more than the context holds still has its conversation read."""
    greedy = conversation(
        *talk("a", "b"), message("user", "c"), truncation="auto", sampling=replace(SAMPLING, max_tokens=10**6)
    )
    assert "<|message|>a<|end|>" in load_encoding().decode((await rendered(greedy, 2048)).token_ids)
