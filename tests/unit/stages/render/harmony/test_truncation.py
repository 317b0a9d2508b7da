"""Items that are dropped from a conversation that does not fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.errors import ContextTooLong
from penstock.pipeline.frames import Prompt, ResolvedRequest, with_facts
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.pairs import callers_of
from penstock.stages.models import text_pieces
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, load_encoding
from penstock.stages.render import truncation
from penstock.stages.render.harmony.render import RenderHarmony
from penstock.stages.render.truncation import to_drop
from tests.support.harmony import (
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


async def rendered(request: ResolvedRequest, context_length: int) -> Prompt:
    async def source() -> AsyncIterator[ResolvedRequest]:
        yield request

    async with aclosing(RenderHarmony(load_encoding(), context_length)(source())) as prompts:
        return await anext(prompts)


def dropped(items: list[Item], excess: int) -> list[int]:
    return sorted(to_drop(items, [10] * len(items), excess))


def talk(*names: str) -> list[Item]:
    return [item for name in names for item in (message("user", name), message("assistant", f"{name}!"))]


def test_oldest_items_are_dropped_first() -> None:
    items: list[Item] = [*talk("a", "b"), message("user", "c")]
    assert [dropped(items, excess) for excess in (-5, 0, 1, 10, 11, 999)] == [*([], [], [0], [0], [0, 1]), [0, 1, 2, 3]]


def test_last_user_message_stays() -> None:
    items: list[Item] = [*talk("a"), message("user", "b"), reasoning("x"), call("f", "{}"), output("1")]
    assert dropped(items, 999) == [0, 1]


def test_instructions_stay() -> None:
    items: list[Item] = [
        message("user", "a"),
        message("system", "b"),
        message("developer", "c"),
        *talk("d"),
        message("user", "e"),
    ]
    assert dropped(items, 999) == [0, 3, 4]


def test_call_is_dropped_with_its_output() -> None:
    items: list[Item] = [call("f", "{}", "a"), custom_call("g", "x", "b"), custom_output("2", "b"), output("1", "a")]
    request = [*items, message("user", "?")]
    assert dropped(request, 1) == [0, 3]
    assert dropped(request, 21) == [0, 1, 2, 3]


def test_call_answered_after_the_last_message_stays() -> None:
    items: list[Item] = [call("f", "{}"), message("user", "?"), output("1")]
    assert dropped(items, 999) == []


def test_server_side_call_is_dropped_whole() -> None:
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


async def test_output_of_a_call_counts() -> None:
    request = conversation(code_call("print(1)", LONG), message("user", "?"), truncation="auto")
    prompt = await rendered(
        with_facts(request, wants_raw_messages=True), len((await rendered(request, 4096)).token_ids) + 50
    )
    assert "python" not in load_encoding().decode(prompt.token_ids)
    assert [raw["role"] for raw in prompt.raw_messages or ()] == ["system", "user"]


def test_reasoning_is_dropped_with_the_next_item() -> None:
    items: list[Item] = [reasoning("a"), reasoning("b"), call("f", "{}"), output("1"), reasoning("c"), *talk("d")]
    assert dropped(items, 1) == [0, 1, 2, 3]
    assert dropped([*items, message("user", "?")], 41) == [0, 1, 2, 3, 4]


def test_last_item_stays_without_a_user_message() -> None:
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
def test_dropped_items_are_whole_and_minimal(kinds: list[str], excess: int) -> None:
    items: list[Item] = [KINDS[kind]() for kind in kinds]
    gone = dropped(items, excess)
    last = max((at for at, kind in enumerate(kinds) if kind == "user"), default=len(kinds) - 1)
    assert all(kinds[at] != "rule" and at < last for at in gone)
    assert len(gone) * 10 >= excess or gone == dropped(items, 9999)
    assert all((answer in gone) == (request in gone) for answer, request in callers_of(items).items())


async def test_fitting_conversation_is_unchanged() -> None:
    request = conversation(*talk("a", "b"), message("user", "c"))
    cut = await rendered(with_facts(request, response=replace(request.facts.response, truncation="auto")), 4096)
    assert cut.token_ids == (await rendered(request, 4096)).token_ids


async def test_long_conversation_is_truncated() -> None:
    turns = talk(*(f"{number} {LONG}" for number in range(20)))
    request = conversation(*turns, message("user", "Last."), instructions="Be brief.", truncation="auto")
    prompt = await rendered(request, 2048)
    text = load_encoding().decode(prompt.token_ids)
    assert len(prompt.token_ids) + (SAMPLING.max_tokens or 0) <= 2048
    assert len(prompt.token_ids) > 1024
    assert "Be brief." in text
    assert "<|start|>user<|message|>Last.<|end|><|start|>assistant" in text
    assert "0 word" not in text.split("19 word")[0][:1000]
    assert prompt.facts.input == request.facts.input


async def test_disabled_truncation_drops_nothing() -> None:
    request = conversation(*talk(*([LONG] * 20)), message("user", "Last."))
    assert len((await rendered(request, 2048)).token_ids) > 2048


async def test_large_token_limit_leaves_half_the_context() -> None:
    greedy = conversation(
        *talk("a", "b"), message("user", "c"), truncation="auto", sampling=replace(SAMPLING, max_tokens=10**6)
    )
    assert "<|message|>a<|end|>" in load_encoding().decode((await rendered(greedy, 2048)).token_ids)


@pytest.fixture
def count_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_CHARACTERS", 1_000)
    monkeypatch.setattr(truncation, "COUNTED", 1_000)


@pytest.mark.usefixtures("count_few")
@pytest.mark.parametrize("parts", [1, 100], ids=["one text", "many messages"])
async def test_prompt_far_too_long_is_refused_before_it_is_encoded(parts: int) -> None:
    messages = [message("user", f"{part}" + "word " * (40_000 // parts)) for part in range(parts)]
    encode = HarmonyEncoding.encode
    with (
        patch.object(HarmonyEncoding, "encode", autospec=True, side_effect=encode) as encodings,
        pytest.raises(ContextTooLong, match="at least"),
    ):
        await rendered(conversation(*messages), 512)
    assert sum(len(call.args[1]) for call in encodings.call_args_list) < 20_000


@pytest.mark.usefixtures("count_few")
async def test_item_far_too_long_is_dropped_or_refused() -> None:
    far_too_long = message("user", "word " * 4_000)
    assert (
        len((await rendered(conversation(far_too_long, message("user", "?"), truncation="auto"), 512)).token_ids) < 512
    )
    with pytest.raises(ContextTooLong, match="at least"):
        await rendered(conversation(far_too_long, truncation="auto"), 512)
