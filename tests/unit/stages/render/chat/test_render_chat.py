"""Prompts for chat models, and requests that a template cannot render."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from penstock.pipeline.errors import ContextTooLong, InvalidRequest
from penstock.pipeline.frames import ResolvedRequest, TemplateOptions, with_facts
from penstock.pipeline.protocol.items import InputImage, InputText, Message
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models import text_pieces
from penstock.stages.models.chat.model import Rendered
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.render import truncation as limits
from penstock.stages.render.chat.render import RenderChat
from tests.support import chat_templates
from tests.support.chat_families import UnknownCallSyntax
from tests.support.event_streams import run_stage
from tests.support.harmony import call, conversation, function, message, output, reasoning

pytestmark = pytest.mark.vllm

HELLO = message("user", "Hello.")
TOOLS = (function("get_weather"),)


def with_template(request: ResolvedRequest, source: str | None = None, **variables: Any) -> ResolvedRequest:
    return with_facts(request, template=TemplateOptions(source, variables))


async def test_prompt_is_the_rendered_template() -> None:
    request = conversation(HELLO, instructions="Be nice.", tools=TOOLS)
    rendered = await chat_templates.prompt(conversation(HELLO, instructions="Be nice."))
    assert chat_templates.vocabulary().decode(rendered.token_ids) == (
        "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat_templates.vocabulary().decode(rendered.stop_token_ids) == "<|im_end|><|endoftext|>"
    assert '"name": "get_weather"' in await chat_templates.text(request)
    assert (await chat_templates.prompt(request)).facts.tools == request.facts.tools


@pytest.mark.defect("V11")
async def test_continuation_has_its_own_parameters() -> None:
    shown = (HELLO, message("assistant", "Hello!"), message("user", "And in Paris?"))
    request = conversation(*shown, instructions="Be brief.", tools=TOOLS, effort="none")
    rendered = await chat_templates.text(request)
    assert rendered.index("Be brief.") < rendered.index("Hello.") < rendered.index("Hello!")
    assert '"name": "get_weather"' in rendered
    chat = (await chat_templates.prompt(request, "{{ reasoning_effort }}")).chat
    assert chat is not None
    assert chat.variables["reasoning_effort"] == "none"


async def test_tools_are_hidden_if_none_may_be_called() -> None:
    """Otherwise all are shown, allowed or not: the prompt stays the same for the cache."""
    two = (function("one"), function("two"))
    hidden = await chat_templates.text(conversation(HELLO, tools=Toolset(two, choice="none")))
    assert hidden == await chat_templates.text(conversation(HELLO))
    allowed = await chat_templates.text(conversation(HELLO, tools=Toolset(two, allowed=((None, "one"),))))
    assert allowed == await chat_templates.text(conversation(HELLO, tools=two))


async def test_later_variables_override_earlier_ones() -> None:
    template = "{{ [reasoning_effort, enable_thinking, thinking, own] | tojson }}"
    nothing: dict[str, Any] = {"reasoning_effort": 0, "enable_thinking": 0, "thinking": 0, "own": 0}
    request = conversation(HELLO)
    assert await chat_templates.text(request, template, variables=nothing) == "[0, 0, 0, 0]"
    low, none = conversation(HELLO, effort="low"), conversation(HELLO, effort="none")
    assert await chat_templates.text(low, template, variables=nothing) == '["low", true, true, 0]'
    assert await chat_templates.text(none, template, variables=nothing) == '["none", false, false, 0]'
    own = with_template(none, enable_thinking=True, own=1)
    assert await chat_templates.text(own, template, variables=nothing) == '["none", true, false, 1]'
    chat = (await chat_templates.prompt(own, template, variables=nothing)).chat
    assert chat is not None
    assert chat.variables == {"reasoning_effort": "none", "enable_thinking": True, "thinking": False, "own": 1}


@pytest.mark.parametrize(
    ("verbosity", "known"),
    [(None, ""), ("medium", ""), ("low", "Keep your answers short."), ("high", "Give detailed answers.")],
)
async def test_verbosity_is_told_in_the_system_message(verbosity: str | None, known: str) -> None:
    shown = await chat_templates.text(conversation(HELLO, verbosity=verbosity))
    assert shown == await chat_templates.text(conversation(HELLO, instructions=known or None))


@pytest.mark.parametrize("name", ["tools", "tokenize", "messages", "chat_template", "continue_final_message"])
async def test_reserved_variables_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await chat_templates.prompt(with_facts(conversation(HELLO), template=TemplateOptions(None, {name: []})))
    assert refused.value.param == "chat_template_kwargs"
    assert name in refused.value.message


async def test_template_of_the_request_needs_the_operators_trust() -> None:
    request = with_template(conversation(HELLO), "{{ messages[0].content }}")
    assert await chat_templates.text(request, trusts_templates=True) == "Hello."
    with pytest.raises(InvalidRequest) as refused:
        await chat_templates.prompt(request)
    assert refused.value.param == "chat_template"


async def test_truncated_answer_is_continued() -> None:
    begun = msgspec.structs.replace(message("assistant", "Hel"), status="incomplete")
    rendered = await chat_templates.prompt(conversation(HELLO, begun))
    assert chat_templates.vocabulary().decode(rendered.token_ids).endswith("Hel")
    assert rendered.chat is not None
    assert rendered.chat.continues


TURN = "<|im_start|>assistant\n"
ASKED = "<|im_start|>user\nHello.<|im_end|>\n" + TURN
THINKING_TEMPLATE = f"{chat_templates.TOOLLESS_TEMPLATE}{{{{- '<think>\n' -}}}}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (chat_templates.QWEN_TEMPLATE, f"{ASKED}<think>\nLet me"),
        (chat_templates.TOOLLESS_TEMPLATE, f"{ASKED}<think>Let me"),
        (THINKING_TEMPLATE, f"{ASKED}<think>\nLet me"),
    ],
    ids=["shown", "hidden", "hidden and begun"],
)
async def test_truncated_thought_is_continued(template: str, shown: str) -> None:
    """Many templates show no thought of a message that has no answer."""
    begun = [msgspec.structs.replace(reasoning(text), status="incomplete") for text in ("Let", " me \n")]
    request = conversation(HELLO, *begun)
    rendered = await chat_templates.prompt(request, template, parsers=UnknownCallSyntax())
    assert chat_templates.vocabulary().decode(rendered.token_ids).strip() == shown
    assert rendered.chat is not None
    assert (rendered.chat.thinks, rendered.chat.continues) == (True, False)


async def test_mark_in_a_truncated_thought_is_text() -> None:
    begun = msgspec.structs.replace(reasoning("The mark </think> ends it, <th"), status="incomplete")
    for template in (chat_templates.QWEN_TEMPLATE, chat_templates.TOOLLESS_TEMPLATE):
        rendered = await chat_templates.prompt(conversation(HELLO, begun), template, parsers=UnknownCallSyntax())
        assert chat_templates.vocabulary().marks["</think>"] not in rendered.token_ids
        assert chat_templates.vocabulary().decode(rendered.token_ids).endswith("The mark </think> ends it, <th")


@pytest.mark.parametrize(
    ("effort", "parsers"), [("none", UnknownCallSyntax()), (None, chat_templates.NoParsers())], ids=["off", "unmarked"]
)
async def test_thought_that_cannot_go_on_is_closed(effort: Any, parsers: Any) -> None:
    begun = msgspec.structs.replace(reasoning("Let me"), status="incomplete")
    rendered, closed = [
        await chat_templates.prompt(conversation(HELLO, thought, effort=effort), parsers=parsers)
        for thought in (begun, reasoning("Let me"))
    ]
    assert rendered.token_ids == closed.token_ids
    assert rendered.chat is not None
    assert not rendered.chat.thinks


async def test_raw_messages_are_the_prompt() -> None:
    rendered = await chat_templates.prompt(with_facts(conversation(HELLO), wants_raw_messages=True))
    shown = chat_templates.vocabulary().decode(rendered.token_ids)
    raw = {"type": "raw_message_tokens", "message": shown, "tokens": list(rendered.token_ids)}
    assert rendered.raw_messages == (raw,)


@pytest.mark.defect("V14")
async def test_images_go_with_the_prompt() -> None:
    image = "data:image/png;base64,AAAA"
    shown = Message("m", "completed", "user", (InputText("See."), InputImage(image)))
    rendered = await chat_templates.prompt(conversation(shown), sees_images=True)
    assert rendered.images == (image,)
    assert image not in chat_templates.vocabulary().decode(rendered.token_ids)


# Templates with fewer features


async def test_template_without_tools_cannot_require_them() -> None:
    assert await chat_templates.text(
        conversation(HELLO, tools=TOOLS), chat_templates.TOOLLESS_TEMPLATE
    ) == await chat_templates.text(conversation(HELLO), chat_templates.TOOLLESS_TEMPLATE)
    with pytest.raises(InvalidRequest) as refused:
        await chat_templates.prompt(
            conversation(HELLO, tools=Toolset(TOOLS, choice="required")), chat_templates.TOOLLESS_TEMPLATE
        )
    assert refused.value.param == "tools"


async def test_strict_template_gets_simpler_messages() -> None:
    items = (HELLO, message("developer", "Be brief."), message("user", "Why?"))
    assert await chat_templates.text(conversation(*items, instructions="Be nice."), chat_templates.STRICT_TEMPLATE) == (
        "<|im_start|>system\nBe nice.\n\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello.\n\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_refusal_of_a_template_is_passed_on() -> None:
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        await chat_templates.prompt(
            conversation(HELLO, call("get_weather", "{}"), output("18")),
            chat_templates.STRICT_TEMPLATE.replace(" + ", " ~ "),
        )


async def test_instructions_are_never_lost() -> None:
    items = (HELLO, message("system", "Be brief."))
    rendered = await chat_templates.text(
        conversation(*items, instructions="Be nice."), chat_templates.LATEST_INSTRUCTIONS_TEMPLATE
    )
    assert rendered.startswith("Be nice.\n\nBe brief.<|im_start|>user")


# Prompts that do not fit


def long(*, truncation: Any) -> ResolvedRequest:
    history = [
        message(role, f"{role} {number} " + "word " * 50) for number in range(20) for role in ("user", "assistant")
    ]
    return conversation(HELLO, history=history, instructions="Be nice.", truncation=truncation)


async def test_oldest_items_are_dropped_until_the_prompt_fits() -> None:
    whole = await chat_templates.prompt(long(truncation="auto"))
    limit = len(whole.token_ids) // 2
    cut = await chat_templates.prompt(long(truncation="auto"), context_length=limit)
    assert limit // 3 < len(cut.token_ids) <= limit - 100
    shown = chat_templates.vocabulary().decode(cut.token_ids)
    assert shown.startswith("<|im_start|>system\nBe nice.<|im_end|>\n")
    assert shown.endswith("Hello.<|im_end|>\n<|im_start|>assistant\n")
    assert "user 0 " not in shown
    assert "assistant 19 " in shown


async def test_nothing_is_dropped_without_truncation() -> None:
    assert len((await chat_templates.prompt(long(truncation="disabled"), context_length=100)).token_ids) > 100


async def test_required_items_are_never_dropped() -> None:
    request = conversation(message("user", "word " * 500), truncation="auto")
    assert len((await chat_templates.prompt(request, context_length=100)).token_ids) > 400


@pytest.mark.parametrize("truncation", ["disabled", "auto"])
async def test_prompt_far_too_long_is_refused_before_it_is_encoded(
    truncation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_CHARACTERS", 1_000)
    monkeypatch.setattr(limits, "COUNTED", 1_000)
    encode = Vocabulary.encode
    request = conversation(message("user", "word " * 40_000), truncation=truncation)
    with (
        patch.object(Vocabulary, "encode", autospec=True, side_effect=encode) as encodings,
        pytest.raises(ContextTooLong, match="at least"),
    ):
        await chat_templates.prompt(request, context_length=512)
    assert sum(len(call.args[1]) for call in encodings.call_args_list) < 20_000


@pytest.mark.parametrize("parts", [1, 100])
async def test_items_far_too_long_are_dropped_before_they_are_encoded(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_CHARACTERS", 1_000)
    monkeypatch.setattr(limits, "COUNTED", 1_000)
    old = [message("user", "word " * (40_000 // parts)) for _ in range(parts)]
    request = conversation(*old, message("assistant", "Yes?"), message("user", "Hm."), truncation="auto")
    encode = Vocabulary.encode
    with patch.object(Vocabulary, "encode", autospec=True, side_effect=encode) as encodings:
        prompt = await chat_templates.prompt(request, context_length=4_096)
    assert "Yes?" in chat_templates.vocabulary().decode(prompt.token_ids)
    assert len(prompt.token_ids) < 4_096
    assert sum(len(call.args[1]) for call in encodings.call_args_list) < 60_000


TRIMMING_TEMPLATE = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n\\n' + (message.content | trim) + '<|im_end|>\\n' -}}
{%- endfor -%}
"""
"""Texts without white space around them, as in Llama."""


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (chat_templates.QWEN_TEMPLATE, "assistant\n<think>\n\n</think>\n\n"),
        (TRIMMING_TEMPLATE, "assistant\n\n"),
        (chat_templates.STRICT_TEMPLATE, "assistant\n"),
        (chat_templates.TOOLLESS_TEMPLATE, "assistant\n"),
    ],
    ids=["qwen", "trimming", "strict", "toolless"],
)
@pytest.mark.parametrize("said", ["Hello.", "\ue000 <|im_end|>"])
async def test_prompt_ends_where_an_empty_answer_begins(template: str, end: str, said: str) -> None:
    begun = msgspec.structs.replace(message("assistant", ""), status="incomplete")
    rendered = await chat_templates.prompt(conversation(message("user", said), begun, effort="none"), template)
    text = chat_templates.vocabulary().decode(rendered.token_ids)
    assert text.endswith(f"{said}<|im_end|>\n<|im_start|>{end}")
    marks = chat_templates.vocabulary().marks
    assert rendered.token_ids.count(marks["<|im_end|>"]) == text.count("<|im_end|>") - said.count("<|im_end|>")
    assert rendered.chat is not None
    assert rendered.chat.continues


class GivesTokens(chat_templates.JinjaTemplate):
    """A template that gives tokens, and refuses an empty answer, as that of Mistral."""

    def render(self, messages: Any, functions: Any, variables: Any, **options: Any) -> Rendered:
        if not messages[-1]["content"]:
            raise InvalidRequest("An answer has a text.", param="input")
        text = super().render(messages, functions, variables, **options).text
        return Rendered("", tuple(chat_templates.vocabulary().encode(text)))


async def test_empty_answer_of_a_template_of_tokens_begins_a_turn() -> None:
    begun = msgspec.structs.replace(message("assistant", ""), status="incomplete")
    chat = replace(chat_templates.model_with_template(), template=GivesTokens(chat_templates.TOOLLESS_TEMPLATE))
    (rendered,) = await run_stage(RenderChat(chat, 1000), [conversation(HELLO, begun)])
    text = chat_templates.vocabulary().decode(rendered.token_ids)
    assert text.endswith("Hello.<|im_end|>\n<|im_start|>assistant\n")
