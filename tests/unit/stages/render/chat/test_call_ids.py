"""The ids of calls in prompts: those that the template of a family shows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given

from penstock.pipeline.protocol.items import Item
from penstock.stages.models.chat.call_ids import CallId, function_and_index, index_alone, nine_characters
from penstock.stages.models.chat.forms import CALL_FORMS
from penstock.stages.models.chat.standalone import OwnParsers
from tests.support.chat_families import FAMILIES, family_model
from tests.support.chat_templates import item_tokens, lay_out_messages, prompt, text, vocabulary
from tests.support.harmony import call, conversation, custom_call, custom_output, function, message, output
from tests.support.parallel_calls import Parallel, parallel_turns

pytestmark = pytest.mark.vllm

ID_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for call in message.tool_calls or () -%}
<tool_call>{{ call.id }} {{ call.function.arguments }}</tool_call>
{%- endfor -%}
{%- if message.role == 'tool' -%}## Return of {{ message.tool_call_id }}
{% endif -%}
{{ message.content or '' }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
"""Ids of calls and results, as Kimi K2 and Mistral have them."""

FORMS: Mapping[CallId, str] = {
    function_and_index: r"functions\.[\w-]+:{}",
    index_alone: "{}",
    nine_characters: "[0-9A-Za-z]{{9}}",
}


@pytest.mark.parametrize("call_id", FORMS, ids=lambda call_id: call_id.__name__)
@given(parallel_turns())
def test_ids_have_the_form_of_the_family(call_id: CallId, turns: list[Parallel]) -> None:
    sent = conversation(history=[item for turn in turns for item in turn.as_sent])
    plain, shown = lay_out_messages(sent).messages, lay_out_messages(sent, call_id=call_id).messages
    called: list[str] = []
    ids: dict[str, str] = {}
    for before, after in zip(plain, shown, strict=True):
        known = [made["id"] for made in before.get("tool_calls", ())]
        new = [made["id"] for made in after.get("tool_calls", ())]
        for made in new:
            assert re.fullmatch(FORMS[call_id].format(len(called)), made)
            called.append(made)
        if "tool_calls" in before:
            ids = dict(zip(known, new, strict=True))
        elif "tool_call_id" in before:
            assert after["tool_call_id"] == ids[before["tool_call_id"]]


@given(parallel_turns())
def test_ids_stay_while_the_conversation_grows(turns: list[Parallel]) -> None:
    history = [item for turn in turns for item in turn.as_sent]
    for end in range(len(turns)):
        part = conversation(history=[item for turn in turns[:end] for item in turn.as_sent])
        begun = lay_out_messages(part, call_id=function_and_index).messages
        whole = lay_out_messages(conversation(history=history), call_id=function_and_index).messages
        ids = [[made["id"] for made in shown.get("tool_calls", ())] for shown in begun]
        assert [made for some in ids for made in some] == [
            made["id"] for shown in whole for made in shown.get("tool_calls", ())
        ][: sum(map(len, ids))]


def test_id_of_an_output_without_its_call_counts() -> None:
    messages = lay_out_messages(
        conversation(message("user", "Hi"), output("lost", "c9"), call("f", "{}"), output("1")),
        call_id=function_and_index,
    ).messages
    assert [shown["tool_call_id"] for shown in messages if shown["role"] == "tool"] == [
        "functions.unknown:0",
        "functions.f:1",
    ]


@pytest.mark.parametrize("family", ["kimi_k2", "mistral", "glm45", "qwen3"])
def test_parsers_say_what_ids_their_family_has(family: str) -> None:
    own = OwnParsers(vocabulary(), None, CALL_FORMS[FAMILIES[family].tools or ""])
    assert family_model(family).parsers.call_id == own.call_id
    assert own.call_id("f", 2, "call_1") == {
        "kimi_k2": "functions.f:2",
        "mistral": nine_characters("f", 2, "call_1"),
    }.get(family, "call_1")


async def test_prompt_has_the_ids_that_kimi_was_trained_with() -> None:
    parsers = OwnParsers(vocabulary(), None, CALL_FORMS["kimi_k2"])
    history: list[Item] = [
        message("user", "Read both."),
        call("read_file", '{"path": "a"}', "call_8c2d"),
        custom_call("sql", "SELECT 1", "call_9"),
        custom_output("one", "call_9"),
        output("A", "call_8c2d"),
    ]
    shown = await text(conversation(history=history, tools=[function("read_file")]), ID_TEMPLATE, parsers=parsers)
    assert re.findall(r"<tool_call>(\S+)|## Return of (\S+)\n(\w+)", shown) == [
        ("functions.read_file:0", "", ""),
        ("functions.sql:1", "", ""),
        ("", "functions.read_file:0", "A"),
        ("", "functions.sql:1", "one"),
    ]


async def test_prompt_with_ids_begins_with_the_previous_prompt_and_output() -> None:
    parsers = OwnParsers(vocabulary(), None, CALL_FORMS["kimi_k2"])
    asked: list[Item] = [message("user", "Read it."), call("read_file", "{}", "c1"), output("A", "c1")]
    made = call("read_file", '{"path":  "b"}', "c2")
    written = '<tool_call>functions.read_file:1 {"path":  "b"}</tool_call><|im_end|>'
    before = await prompt(conversation(history=asked), ID_TEMPLATE, parsers=parsers)
    known = dict([item_tokens(made, written)])
    request = msgspec.structs.replace(conversation(history=[*asked, made, output("B", "c2")]), tokens=known)
    after = await prompt(request, ID_TEMPLATE, parsers=parsers)
    generated = (*before.token_ids, *known[made.id])
    assert after.token_ids[: len(generated)] == generated
