"""Output of the engine keeps its tokens, so that a prompt begins with the previous one."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.items import Item
from penstock.stages.render.chat.guard import Guard
from penstock.stages.render.chat.verbatim import spelled
from tests.support.chat_templates import prompt, vocabulary
from tests.support.harmony import approval, call, conversation, decision, function, mcp_call, message, output, reasoning

pytestmark = pytest.mark.vllm

TOOLS = [function("get_weather")]


def letters(text: str) -> TokenIds:
    """The text in tokens that no encoder would choose: marks, and at least one token for each character."""
    pieces = vocabulary().marks_pattern.split(text)
    marks = [*vocabulary().marks_pattern.findall(text), ""]
    return tuple(
        token
        for piece, mark in zip(pieces, marks, strict=True)
        for part in (*piece, mark)
        for token in vocabulary().encode(part)
    )


def known(request: Any, *items: tuple[Item, str]) -> Any:
    return msgspec.structs.replace(request, tokens={item.id: letters(text) for item, text in items})


def within(token_ids: TokenIds, start: str) -> TokenIds:
    """The tokens from the text ``start``, spelled in letters, up to the end of its message."""
    wanted = letters(start)
    at = next(at for at in range(len(token_ids)) if token_ids[at : at + len(wanted)] == wanted)
    return token_ids[at : token_ids.index(vocabulary().marks["<|im_end|>"], at) + 1]


async def test_prompt_begins_with_the_previous_prompt_and_output() -> None:
    request: list[Item] = [message("user", "How warm is it in Oslo?")]
    thought, called = reasoning("I look."), call("get_weather", '{"city": "Oslo"}')
    first = "<think>\nI look.\n</think>\n\n"
    second = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    again, answer = reasoning("Warm."), message("assistant", "It is warm.")
    third, fourth = "<think>\nWarm.\n</think>\n\n", "It is warm.<|im_end|>"
    before = await prompt(conversation(*request, tools=TOOLS))
    loop: list[Item] = [*request, thought, called, output("18")]
    between = await prompt(known(conversation(*loop, tools=TOOLS), (thought, first), (called, second)))
    assert letters(first + second) != tuple(vocabulary().encode(first + second))
    assert between.token_ids[: len(before.token_ids)] == before.token_ids
    assert between.token_ids[len(before.token_ids) :][: len(letters(first + second))] == letters(first + second)
    whole = known(
        conversation(*loop, again, answer, tools=TOOLS),
        *((thought, first), (called, second), (again, third), (answer, fourth)),
    )
    after = await prompt(whole)
    generated = (*between.token_ids, *letters(third + fourth))
    assert after.token_ids[: len(generated)] == generated


BEGINNING = "<think>\n I look.\n</think>\n\n"


@pytest.mark.parametrize(
    ("written", "rendered"),
    [(BEGINNING, BEGINNING), (BEGINNING.rstrip(), f"{BEGINNING.rstrip()}\n\n"), ("", "<think>\nI look.\n</think>\n\n")],
    ids=["with what follows", "without what follows", "nothing"],
)
async def test_known_beginning_of_a_turn_keeps_its_tokens(written: str, rendered: str) -> None:
    """A client that keeps the conversation itself has the tokens of thoughts alone."""
    thought, called = reasoning(" I look."), call("get_weather", '{"city": "Oslo"}')
    request = conversation(message("user", "How warm is it?"), thought, called, output("18"), tools=TOOLS)
    token_ids = (await prompt(known(request, *([(thought, written)] if written else ())))).token_ids
    turn = rendered + '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    rest = vocabulary().encode_further(turn.removeprefix(written))
    whole = (*letters(written), *rest)
    begin = next(at for at in range(len(token_ids)) if token_ids[at : at + len(whole)] == whole)
    assert vocabulary().decode(token_ids[:begin]).endswith("<|im_start|>assistant\n")


async def test_approved_call_has_the_tokens_of_its_request() -> None:
    request = approval("read", '{"id": 1}')
    made = msgspec.structs.replace(mcp_call("read", '{"id": 1}', "Text."), approval_request_id=request.id)
    written = '<tool_call>\n{"name": "docs__read", "arguments": {"id": 1}}\n</tool_call><|im_end|>'
    items = (message("user", "Read it."), request, decision(request, approve=True), made)
    rendered = await prompt(known(conversation(*items), (request, written)))
    assert within(rendered.token_ids, "<tool_call>") == letters(written)


async def test_omitted_reasoning_stays_omitted() -> None:
    thought, answer = reasoning("Hm."), message("assistant", "Yes.")
    items = (message("user", "So?"), thought, answer, message("user", "And?"))
    plain = await prompt(conversation(*items))
    written = ((thought, "<think>\nHm.\n</think>\n\n"), (answer, "Yes.<|im_end|>"))
    assert (await prompt(known(conversation(*items), *written))).token_ids == plain.token_ids


@pytest.mark.parametrize("written", ['{"city":"Oslo"}', '{ "city" : "Oslo" }'])
async def test_white_space_in_arguments_is_the_models(written: str) -> None:
    called = call("get_weather", written)
    items = (message("user", "So?"), called, output("18"))
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {written}}}\n</tool_call><|im_end|>'
    rendered = await prompt(known(conversation(*items, tools=TOOLS), (called, text)))
    assert text in vocabulary().decode(rendered.token_ids)


async def test_foreign_end_of_turn_is_replaced() -> None:
    answer = message("assistant", "Yes.")
    items = (message("user", "So?"), answer, message("user", "And?"))
    rendered = await prompt(known(conversation(*items), (answer, "Yes.<|endoftext|>")))
    assert vocabulary().marks["<|endoftext|>"] not in rendered.token_ids
    assert letters("Yes.<|im_end|>") == within(rendered.token_ids, "Yes")


@given(st.lists(st.tuples(st.text("ab <\n", max_size=6), st.text("ab <\n", min_size=1, max_size=6)), max_size=4))
def test_known_tokens_never_change_the_text(pieces: list[tuple[str, str]]) -> None:
    text = "".join(f"{between}<think>{turn}<|im_end|>" for between, turn in pieces)
    turns = [letters(f"<think>{turn}<|im_end|>") for _, turn in pieces]
    token_ids = [*chain.from_iterable(spelled(text, turns, Guard(vocabulary(), ()).cut, vocabulary()))]
    assert vocabulary().decode(token_ids) == text
    assert [
        *chain.from_iterable(spelled(text, [letters("nowhere<|im_end|>")], Guard(vocabulary(), ()).cut, vocabulary()))
    ] == vocabulary().encode(text)
