"""What the engine wrote is read to it in its own tokens, so that a prompt begins with the one before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.frames import TokenIds
from pipeline.protocol.items import Item
from stages.render.chat.guard import Guard
from stages.render.chat.verbatim import spelled
from tests.support.chat_templates import prompt, vocabulary
from tests.support.harmony_conversations import (
    approval,
    call,
    conversation,
    decision,
    function,
    mcp_call,
    message,
    output,
    reasoning,
)

TOOLS = [function("get_weather")]
UNCUT = Guard(vocabulary()).cut


def letters(text: str) -> TokenIds:
    """The text in tokens that nobody would encode it in: marks, and one token for each character."""
    pieces = vocabulary().marks_pattern.split(text)
    marks = [*vocabulary().marks_pattern.findall(text), ""]
    return tuple(
        token
        for piece, mark in zip(pieces, marks, strict=True)
        for part in (*piece, mark)
        for token in vocabulary().encode(part)
    )


def known(asked: Any, *items: tuple[Item, str]) -> Any:
    return msgspec.structs.replace(asked, tokens={item.id: letters(text) for item, text in items})


def within(token_ids: TokenIds, start: str) -> TokenIds:
    """The tokens from the text ``start``, spelled in letters, up to the end of its message."""
    wanted = letters(start)
    at = next(at for at in range(len(token_ids)) if token_ids[at : at + len(wanted)] == wanted)
    return token_ids[at : token_ids.index(vocabulary().marks["<|im_end|>"], at) + 1]


async def test_a_prompt_begins_with_the_one_before_and_what_came_of_it() -> None:
    """Through a loop of calls nothing is spelled anew, though the engine spelled in its own way."""
    asked: list[Item] = [message("user", "How warm is it in Oslo?")]
    thought, called = reasoning("I look."), call("get_weather", '{"city": "Oslo"}')
    first = "<think>\nI look.\n</think>\n\n"
    second = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    again, answer = reasoning("Warm."), message("assistant", "It is warm.")
    third, fourth = "<think>\nWarm.\n</think>\n\n", "It is warm.<|im_end|>"
    before = await prompt(conversation(*asked, tools=TOOLS))
    loop: list[Item] = [*asked, thought, called, output("18")]
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


async def test_a_call_that_was_approved_of_is_in_the_words_of_its_request() -> None:
    """The model wrote the request; the call that was made of it is no other."""
    asked = approval("read", '{"id": 1}')
    made = msgspec.structs.replace(mcp_call("read", '{"id": 1}', "Text."), approval_request_id=asked.id)
    written = '<tool_call>\n{"name": "docs__read", "arguments": {"id": 1}}\n</tool_call><|im_end|>'
    items = (message("user", "Read it."), asked, decision(asked, approve=True), made)
    rendered = await prompt(known(conversation(*items), (asked, written)))
    assert within(rendered.token_ids, "<tool_call>") == letters(written)


async def test_what_the_template_leaves_out_stays_out() -> None:
    """Thoughts of an earlier request are not read again, whatever is known of their tokens."""
    thought, answer = reasoning("Hm."), message("assistant", "Yes.")
    items = (message("user", "So?"), thought, answer, message("user", "And?"))
    plain = await prompt(conversation(*items))
    written = ((thought, "<think>\nHm.\n</think>\n\n"), (answer, "Yes.<|im_end|>"))
    assert (await prompt(known(conversation(*items), *written))).token_ids == plain.token_ids


@pytest.mark.parametrize("written", ['{"city":"Oslo"}', '{ "city" : "Oslo" }'])
async def test_white_space_that_a_template_has_its_own_way_with_is_the_models(written: str) -> None:
    """Arguments are spaced as the model spaced them."""
    called = call("get_weather", written)
    items = (message("user", "So?"), called, output("18"))
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {written}}}\n</tool_call><|im_end|>'
    rendered = await prompt(known(conversation(*items, tools=TOOLS), (called, text)))
    assert text in vocabulary().decode(rendered.token_ids)


async def test_a_turn_that_ended_in_another_mark_has_the_templates() -> None:
    """A stop that the template does not know is not read again; all before it is."""
    answer = message("assistant", "Yes.")
    items = (message("user", "So?"), answer, message("user", "And?"))
    rendered = await prompt(known(conversation(*items), (answer, "Yes.<|endoftext|>")))
    assert vocabulary().marks["<|endoftext|>"] not in rendered.token_ids
    assert letters("Yes.<|im_end|>") == within(rendered.token_ids, "Yes")


@given(st.lists(st.tuples(st.text("ab <\n", max_size=6), st.text("ab <\n", min_size=1, max_size=6)), max_size=4))
def test_the_text_stays_what_was_rendered(pieces: list[tuple[str, str]]) -> None:
    """What is found to the letter changes the tokens of a text, never the text; what is not changes nothing."""
    text = "".join(f"{between}<think>{turn}<|im_end|>" for between, turn in pieces)
    turns = [letters(f"<think>{turn}<|im_end|>") for _, turn in pieces]
    token_ids = [*spelled(text, turns, UNCUT, vocabulary())]
    assert vocabulary().decode(token_ids) == text
    assert [*spelled(text, [letters("nowhere<|im_end|>")], UNCUT, vocabulary())] == vocabulary().encode(text)
