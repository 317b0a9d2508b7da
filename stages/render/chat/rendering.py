"""Render one conversation with its template, with all or only some of its items."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import Any

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import Item
from penstock.stages.models.chat.content import Content, as_parts, as_text
from penstock.stages.models.chat.functions import functions
from penstock.stages.models.chat.model import ChatMessage, ChatModel, Rendered
from penstock.stages.models.chat.names import ToolNames
from penstock.stages.models.text_pieces import pieces
from penstock.stages.render.chat.guard import Guard, unused_in
from penstock.stages.render.chat.messages import Arguments, ChatConversation, MessageContext, chat_conversation
from penstock.stages.render.chat.verbatim import spelled
from penstock.stages.render.item_texts import placed, split
from penstock.stages.render.truncation import refuse_excess

logger = logging.getLogger(__name__)

_MARKUP_TOKENS = 8
"""The approximate number of tokens that a template writes around a message."""

_CHARACTERS = 4
"""The approximate number of characters of a token."""


class Rendering:
    """Renders the prompts of one request; truncation may need several."""

    def __init__(
        self, chat: ChatModel, request: ResolvedRequest, images: Mapping[str, str], context_length: int
    ) -> None:
        names = ToolNames(request.facts.tools)
        self._instructions, self.items = split(request)
        elsewhere = placed(request)
        self.functions = functions(request.facts.tools, names, elsewhere)
        self.variables = variables(chat, request)
        self._chat = chat
        self._context_length = context_length
        self._source = request.facts.template.source
        stops = frozenset(chat.stop_token_ids)
        self._context = MessageContext(
            request, names=names, images=images, stops=stops, call_id=chat.parsers.call_id, placed=elsewhere
        )

    def prompt(self, items: Sequence[Item]) -> tuple[ChatConversation, Sequence[int]]:
        """Return the prompt with these items.

        Raises `InvalidRequest` if the template refuses it, and `ContextTooLong` if it is far too long.
        """
        try:
            return self._prompt(items)
        except RecursionError as error:  # schemas of MCP servers may have any number of levels
            raise InvalidRequest("The tools of this request are nested too deeply.", param="tools") from error

    def _prompt(self, items: Sequence[Item]) -> tuple[ChatConversation, Sequence[int]]:
        conversation = chat_conversation(self._instructions, items, self._context)
        if conversation.thinks:
            if self._is_thinking and (token_ids := self._in_thought(conversation)):
                return conversation, token_ids
            conversation = replace(conversation, thinks=False)
        is_empty = conversation.continues and not conversation.messages[-1]["content"]
        if is_empty and (token_ids := self._before_answer(conversation)):
            return conversation, token_ids
        guard = Guard(self._chat.vocabulary, (conversation.messages, self.functions, self.variables))
        rendered = self._rendered(conversation, guard.guarded())
        if rendered.token_ids and guard.is_needed:  # a renderer of tokens keeps marks and text apart itself
            rendered = self._rendered(conversation, (conversation.messages, self.functions, self.variables))
        return conversation, rendered.token_ids or self._encoded(rendered.text, conversation, guard)

    @property
    def _is_thinking(self) -> bool:
        """True if the marks of thoughts are known, unless the variables turn thinking off."""
        is_off = False in (self.variables.get("enable_thinking"), self.variables.get("thinking"))
        return self._chat.parsers.thinking is not None and not is_off

    def _in_thought(self, conversation: ChatConversation) -> Sequence[int]:
        """Return the prompt up to the end of the thought that was cut; empty if the model cannot continue it.

        Many templates do not show a thought without an answer.  It then follows the beginning of a new turn.
        """
        *before, last = conversation.messages
        here = unused_in(conversation.messages, self.functions, self.variables)
        thought = f"{last['reasoning'].rstrip()}{here}"
        shown = {**last, "reasoning": thought, "reasoning_content": thought}
        guard = Guard(self._chat.vocabulary, (before, shown, self.functions, self.variables))
        before, shown, *others = guard.guarded()
        text, is_shown, _ = self._rendered(conversation, ([*before, shown], *others)).text.rpartition(here)
        if not is_shown and before and (begun := self._begun(self._rendered(conversation, (before, *others)).text)):
            text = f"{begun}{shown['reasoning'].removesuffix(here)}"
        return self._encoded(text, conversation, guard) if text else ()

    def _before_answer(self, conversation: ChatConversation) -> Sequence[int]:
        """Return the prompt up to an answer that is still empty; nothing if the template does not show it.

        Many templates trim texts, and would take away the white space before an empty one.
        """
        *before, last = conversation.messages
        here = unused_in(conversation.messages, self.functions, self.variables)
        shown = {**last, "content": here}
        guard = Guard(self._chat.vocabulary, (before, shown, self.functions, self.variables))
        guarded, shown, *others = guard.guarded()
        rendered = self._rendered(conversation, ([*guarded, shown], *others))
        if rendered.token_ids:
            begun, is_alone = replace(conversation, continues=False), last.keys() == {"role", "content"}
            return self._rendered(begun, (before, self.functions, self.variables)).token_ids if is_alone else ()
        text, _, _ = rendered.text.rpartition(here)
        return self._encoded(text, conversation, guard) if text else ()

    def _begun(self, prompt: str) -> str:
        """Return a prompt that ends in the mark that begins a thought; empty if the template has ended the thought."""
        begin, end = self._chat.parsers.thinking or ("", "")
        tail = prompt.rstrip()
        if not begin or not tail or tail.endswith(end.strip()):
            return ""
        return prompt if tail.endswith(begin.strip()) else f"{prompt}{begin}"

    def _encoded(self, text: str, conversation: ChatConversation, guard: Guard) -> Sequence[int]:
        self._check_functions(text)
        token_ids = array("I")  # four bytes for a token
        for ids in spelled(text, conversation.turns, guard.cut, self._chat.vocabulary):
            token_ids.extend(ids)
            refuse_excess(len(token_ids), self._context_length)
        return token_ids

    def sizes(self) -> list[int]:
        """Estimate the numbers of tokens of all items.

        Once the latest items fill the context, the texts of older ones are not encoded, as these cannot stay.
        """
        sizes: list[int] = []
        left = self._context_length
        for item in reversed(self.items):
            sizes.append(self._size(item, left))
            left -= sizes[-1]
        return sizes[::-1]

    def _size(self, item: Item, left: int) -> int:
        messages = chat_conversation((), (item,), self._context).messages
        texts = (piece for message in messages for text in _texts(message) for piece in pieces(text))
        size = _MARKUP_TOKENS * len(messages)
        for text in texts:
            size += len(self._chat.vocabulary.encode(text)) if size < left else len(text) // _CHARACTERS
        return size

    def _rendered(self, conversation: ChatConversation, guarded: tuple[Any, ...]) -> Rendered:
        """Render the prompt as it is, or simplified if the template refuses it or leaves out instructions."""
        messages, *others = guarded
        plain = simplified(messages)
        try:
            rendered = self._render(messages, *others, continues=conversation.continues)
        except InvalidRequest:
            if plain == [*messages]:
                raise
        else:
            if rendered.token_ids or not _silenced(messages, rendered.text):
                return rendered
        return self._render(plain, *others, continues=conversation.continues)

    def _render(self, messages: Sequence[ChatMessage], shown: Any, settings: Any, *, continues: bool) -> Rendered:
        return self._chat.template.render(messages, shown, settings, source=self._source, continues=continues)

    def _check_functions(self, text: str) -> None:
        """Raise `InvalidRequest` if the template shows no tools though one must be called; else log a warning.

        Many templates do not support functions, and ignore them without an error.
        """
        if not self.functions or any(function["function"]["name"] in text for function in self.functions):
            return
        if self._context.request.facts.tools.choice == "required":
            raise InvalidRequest("The model cannot call tools: its chat template does not show it any.", param="tools")
        _warn_of_hidden_tools()


@cache
def _warn_of_hidden_tools() -> None:
    logger.warning("The chat template does not show tools to the model: it will not call those of requests")


def _silenced(messages: Sequence[ChatMessage], text: str) -> bool:
    """Return True if the template left out some of several system messages."""
    system_contents = [as_parts(message["content"]) for message in messages if message["role"] == "system"]
    system_texts = (part["text"].strip() for parts in system_contents for part in parts)
    return len(system_contents) > 1 and not all(instructions in text for instructions in system_texts)


def _texts(message: ChatMessage) -> Iterator[str]:
    yield from (part.get("text", "") for part in as_parts(message.get("content")))
    yield message.get("reasoning", "")
    for call in message.get("tool_calls", ()):
        arguments: Arguments = call["function"]["arguments"]
        yield f"{call['function']['name']}{arguments.text}"


_OURS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
        *("model_config", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "self"),
        *("tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""The renderer's own parameters, which only the server may set."""


def variables(chat: ChatModel, request: ResolvedRequest) -> Mapping[str, Any]:
    """Return the variables of the next prompt.

    Later sources override earlier ones.  Raises `InvalidRequest` if the request sets a reserved variable, or brings a
    chat template that the server does not accept.
    """
    options = request.facts.template
    if reserved := sorted(_OURS & options.variables.keys()):
        raise InvalidRequest(
            f"Only the server may set these template variables: {', '.join(reserved)}.", param="chat_template_kwargs"
        )
    if options.source is not None and not chat.trusts_templates:
        raise InvalidRequest("This server does not accept chat templates from requests.", param="chat_template")
    return {**chat.variables, **_of_effort(request.facts.effort), **options.variables}


def _of_effort(effort: str | None) -> Mapping[str, Any]:
    """Return an effort as template variables, under all names in use: a template reads the names that it knows."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def simplified(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with all instructions in one, consecutive ones of one side merged, and a text in each."""
    instructions = [message["content"] for message in messages if message["role"] == "system"]
    plain: list[ChatMessage] = [{"role": "system", "content": reduce(_joined, instructions)}] if instructions else []
    for message in messages:
        if message["role"] == "system":
            continue
        last = plain[-1] if plain else None
        if last and last["role"] == message["role"] == "user":
            plain[-1] = {**last, "content": _joined(last["content"], message["content"])}
        elif last and last["role"] == message["role"] == "assistant" and not last.get("tool_calls"):
            plain[-1] = {**last, **message, "content": _joined(last["content"] or "", message["content"] or "")}
        else:
            plain.append(message if message["content"] is not None else {**message, "content": ""})
    return plain


def _joined(first: Content, second: Content) -> Content:
    before, after = as_text(first), as_text(second)
    if isinstance(before, str) and isinstance(after, str):
        return "\n\n".join(filter(None, (before, after)))
    return [*as_parts(first), *as_parts(second)]
