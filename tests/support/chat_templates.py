"""Chat models without vLLM: the tiny Qwen's vocabulary, with its own template or with another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import GenerationStarted, Prompt, ResolvedRequest
from penstock.pipeline.protocol.items import Item
from penstock.stages.models.chat.call_ids import CallId, id_of_client
from penstock.stages.models.chat.content import as_template_takes
from penstock.stages.models.chat.model import ChatMessage, ChatModel, Function, OutputParser, Rendered
from penstock.stages.models.chat.names import ToolNames
from penstock.stages.models.chat.standalone import OwnParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.render.chat.messages import ChatConversation, MessageContext, chat_conversation
from penstock.stages.render.chat.render import RenderChat
from penstock.stages.render.item_texts import split
from tests.support.chat_families import fast_tokenizer
from tests.support.event_streams import run_stage
from tests.support.paths import TINY_QWEN

QWEN_TEMPLATE = (TINY_QWEN / "chat_template.jinja").read_text()

TOOLLESS_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
"""Roles and texts alone, as in many chat models."""

STRICT_TEMPLATE = """
{%- if messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') -}}
    {%- elif message.role == 'system' -%}
        {{- raise_exception('Instructions come first.') -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
"""Instructions first, then alternating roles, in texts that ``+`` can join, as in Gemma and Mistral."""

LATEST_INSTRUCTIONS_TEMPLATE = """
{%- set told = namespace(text='') -%}
{%- for message in messages if message.role == 'system' %}{% set told.text = message.content %}{% endfor -%}
{{- told.text -}}
{%- for message in messages if message.role != 'system' -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
"""
"""The last instructions alone, as in DeepSeek R1."""


IMAGES_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string or message.content is none -%}{{- message.content or '' -}}
    {%- else -%}
        {%- for part in message.content -%}{{- part.text if part.type == 'text' else '<image>' -}}{%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
"""
"""Each image as ``<image>``, in its place."""


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(fast_tokenizer(tokenizer_file=str(TINY_QWEN / "tokenizer.json"), eos_token="<|im_end|>"))


@dataclass(frozen=True)
class JinjaTemplate:
    """A template as transformers renders it, with arguments that have names."""

    template: str

    def render(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        *,
        source: str | None = None,
        continues: bool = False,
    ) -> Rendered:
        from jinja2 import TemplateError  # noqa: PLC0415 - comes with transformers

        try:
            text = vocabulary().tokenizer.apply_chat_template(
                [as_template_takes(message, parts=False) for message in messages],
                tools=list(functions) or None,
                chat_template=source or self.template,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **variables,
            )
        except TemplateError as error:
            raise InvalidRequest(str(error), param="input") from error
        return Rendered(text)


class NoParsers:
    """Parsers of a model without known marks of reasoning and calls."""

    thinking = None
    call_id = staticmethod(id_of_client)

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        raise AssertionError

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> None:
        """Return None: the model has no marks of calls."""


def model_with_template(template: str = QWEN_TEMPLATE, **settings: Any) -> ChatModel:
    """A model with this template; its output cannot be parsed."""
    words = vocabulary()
    ends = (words.marks["<|im_end|>"], words.marks["<|endoftext|>"])
    parsers, variables = settings.pop("parsers", NoParsers()), settings.pop("variables", {})
    return ChatModel(words, JinjaTemplate(template), parsers, ends, variables, **settings)


def model_with_images(*, sees: bool = True) -> ChatModel:
    """A model whose template has places for images, and which writes plain text."""
    return model_with_template(IMAGES_TEMPLATE, parsers=OwnParsers(vocabulary(), None, None), sees_images=sees)


async def prompt(
    conversation: ResolvedRequest, template: str = QWEN_TEMPLATE, *, context_length: int = 100_000, **settings: Any
) -> Prompt:
    (rendered,) = await run_stage(RenderChat(model_with_template(template, **settings), context_length), [conversation])
    assert isinstance(rendered, Prompt)
    return rendered


async def text(conversation: ResolvedRequest, template: str = QWEN_TEMPLATE, **settings: Any) -> str:
    return vocabulary().decode((await prompt(conversation, template, **settings)).token_ids)


def lay_out_messages(
    conversation: ResolvedRequest, *, images: Mapping[str, str] | None = None, call_id: CallId = id_of_client
) -> ChatConversation:
    instructions, items = split(conversation)
    ends = model_with_template().stop_token_ids
    names = ToolNames(conversation.facts.tools)
    return chat_conversation(instructions, items, MessageContext(conversation, names, images or {}, ends, call_id))


def messages_in_brief(conversation: ResolvedRequest) -> list[dict[str, Any]]:
    """The messages of a conversation without reasoning and empty fields; a call is its name and arguments."""
    return [_short(message) for message in lay_out_messages(conversation).messages]


def _short(message: ChatMessage) -> dict[str, Any]:
    short = {key: value for key, value in message.items() if value is not None and key != "reasoning_content"}
    if "tool_calls" in message:
        calls = (call["function"] for call in message["tool_calls"])
        short["tool_calls"] = [(call["name"], json.loads(json.dumps(call["arguments"]))) for call in calls]
    return short


def item_tokens(item: Item, text: str) -> tuple[str, tuple[int, ...]]:
    return item.id, tuple(vocabulary().encode(text))
