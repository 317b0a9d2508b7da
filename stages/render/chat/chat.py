"""Render for models with a chat template: a conversation becomes the token ids that the model continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.frames import ChatTurn, Conversation, Prompt, TokenIds
from pipeline.protocol.items import Item
from stages.chat.model import ChatMessage, ChatModel, Function, Rendered
from stages.chat.names import ToolNames
from stages.render.chat.functions import functions
from stages.render.chat.grammar import grammar
from stages.render.chat.guard import Guard
from stages.render.chat.messages import Layout, lay_out, split
from stages.render.chat.variables import variables
from stages.render.chat.verbatim import spelled


@dataclass(frozen=True)
class RenderChat:
    """Turns a conversation into the prompt of the next turn, off the event loop.

    ``context_length`` is how many tokens prompt and answer may have together: what does not fit is cut to it where the
    request asks for that.
    """

    chat: ChatModel
    context_length: int

    async def __call__(self, source: AsyncIterator[Conversation]) -> AsyncGenerator[Prompt, None]:
        """One prompt for each conversation; raises `InvalidRequest` for what the template refuses."""
        async for conversation in source:
            yield await asyncio.to_thread(self._prompt, conversation)

    def _prompt(self, conversation: Conversation) -> Prompt:
        names = ToolNames(conversation.tools)
        told = functions(conversation.tools, names)
        settings = variables(self.chat, conversation)
        rendering = _Rendering(self.chat, conversation, names, told, settings)
        layout, token_ids = self._fitting(rendering)
        rules, calls = grammar(self.chat, conversation, told, token_ids, continues=layout.continues)
        return Prompt(
            response=conversation.response,
            input=conversation.input,
            token_ids=token_ids,
            stop_token_ids=self.chat.stop_token_ids,
            sampling=conversation.sampling,
            tools=conversation.tools,
            grammar=rules,
            scheduling=conversation.scheduling,
            raw_messages=(self._raw(token_ids),) if conversation.raw_messages else None,
            origin=conversation.origin,
            images=layout.images,
            chat=ChatTurn(variables=settings, calls=calls, continues=layout.continues),
        )

    def _fitting(self, rendering: _Rendering) -> tuple[Layout, TokenIds]:
        return rendering.rendered(rendering.items)

    def _raw(self, token_ids: TokenIds) -> dict[str, Any]:
        """The prompt as vLLM tells of it, to debug it by."""
        text = self.chat.vocabulary.decode(token_ids)
        return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


class _Rendering:
    """Renders one conversation, whole or in part."""

    def __init__(
        self,
        chat: ChatModel,
        conversation: Conversation,
        names: ToolNames,
        told: Sequence[Function],
        settings: Mapping[str, Any],
    ) -> None:
        self.instructions, self.items = split(conversation)
        self._chat = chat
        self._conversation = conversation
        self._names = names
        self._functions = told
        self._variables = settings

    def rendered(self, items: Sequence[Item]) -> tuple[Layout, TokenIds]:
        """The prompt of these items."""
        layout = lay_out(self.instructions, items, self._conversation, self._names, self._chat.stop_token_ids)
        return layout, self._tokens(layout.messages, layout)

    def _tokens(self, messages: Sequence[ChatMessage], layout: Layout) -> TokenIds:
        guard = Guard(self._chat.vocabulary, messages, self._functions, self._variables)
        rendered = self._render(*guard.guarded(), continues=layout.continues)
        if rendered.token_ids and guard.is_needed:  # who gives tokens tells marks from text
            rendered = self._render(messages, self._functions, self._variables, continues=layout.continues)
        if rendered.token_ids:
            return rendered.token_ids
        return tuple(spelled(rendered.text, layout.turns, guard.cut, self._chat.vocabulary))

    def _render(
        self,
        messages: Sequence[ChatMessage],
        told: Sequence[Function],
        settings: Mapping[str, Any],
        *,
        continues: bool,
    ) -> Rendered:
        source = self._conversation.template.source
        return self._chat.template.render(messages, told, settings, source=source, continues=continues)
