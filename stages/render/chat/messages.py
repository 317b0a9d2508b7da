"""Conversations as chat templates read them: messages of the Chat Completions API.

The model's output of one turn is one message with its reasoning, its text and its calls.  The results of the calls
follow it.  The tokens that the engine generated show where a turn ends, since its last token is a stop token.  If they
are not known, the order of the items decides.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.frames import ResolvedRequest, TokenIds
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.pairs import callers_of
from penstock.pipeline.protocol.params.json_body import MOST_LEVELS
from penstock.pipeline.protocol.tools import ToolKey, tool_key
from penstock.stages.models.call_results import output_of, refusals_in, result_of
from penstock.stages.models.chat.call_ids import CallId, id_of_client
from penstock.stages.models.chat.content import Content, content_of, text_part
from penstock.stages.models.chat.functions import described
from penstock.stages.models.chat.model import ChatMessage
from penstock.stages.models.chat.names import ToolNames, text_argument
from penstock.stages.render.item_texts import (
    PENDING,
    arguments_of,
    brought_by,
    found_elsewhere,
    is_continuation,
    is_cut,
    json_text,
    summary_of,
)


@dataclass
class Turn:
    """A turn being assembled from items.

    ``thoughts`` and ``texts`` are the texts of the parts of each item.
    ``tokens`` are the tokens that the engine generated for its first items.  ``is_whole`` is False once an item has
    none, and no more are added.  ``is_over`` is True if the latest item's tokens end the turn, and None if they are not
    known.  ``returned`` is True once the output of a call has followed the turn.  ``ran`` is True if it holds a call
    that the server ran, with its result.
    """

    thoughts: list[list[str]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    calls: list[ChatMessage] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)
    tokens: TokenIds = ()
    is_whole: bool = True
    is_over: bool | None = None
    returned: bool = False
    ran: bool = False

    def is_left_by(self, item: items.Item) -> bool:
        """Return True if ``item``, also written by the model, begins another turn.

        If no tokens are known, the order decides: in one turn, no reasoning follows text or a call, and no text follows
        a call that the server ran, because the model reads the result first.
        """
        if self.returned or self.is_over is not None:
            return self.returned or bool(self.is_over)
        match item:
            case items.Reasoning():
                return bool(self.calls or self.texts)
            case items.Message():
                return self.ran
            case _:
                return False

    def messages(self) -> Iterator[ChatMessage]:
        """Yield the message that the model wrote, then the results that it read."""
        message: ChatMessage = {"role": "assistant", "content": None}
        if self.texts:
            message["content"] = content_of(self.texts[0]) if len(self.texts) == 1 else _paragraphs(self.texts)
        if self.thoughts:
            message["reasoning"] = message["reasoning_content"] = _paragraphs(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        yield message
        yield from self.results


def _paragraphs(texts: Iterable[list[str]]) -> str:
    return "\n\n".join(filter(None, map("\n".join, texts)))


_BROKEN = "arguments"


class Arguments(dict[str, Any]):
    """Arguments as a dict by name; as a string, the JSON text that the model wrote, valid or not.

    A template may use either form.  Text that is not a JSON object, or is nested too deeply, becomes the single
    argument ``arguments`` of the dict.
    """

    def __init__(self, text: str, named: Mapping[str, Any] | None = None) -> None:
        super().__init__(_named(text) if named is None else named)
        self.text = text

    def __str__(self) -> str:
        return self.text or "{}"

    def __add__(self, more: str) -> str:
        return str(self) + more

    def __radd__(self, before: str) -> str:
        return before + str(self)

    def __deepcopy__(self, memo: object) -> Arguments:
        return Arguments(self.text, self)  # the values are never changed, so they can be shared


def _named(text: str) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        named = json.loads(text)
    except (ValueError, RecursionError):  # the model, or a client, wrote these arguments
        named = None
    return named if isinstance(named, dict) and not _is_deep(named, MOST_LEVELS) else {_BROKEN: text}


def _is_deep(value: Any, most: int) -> bool:
    """Return True if ``value`` has more than ``most`` levels: templates and JSON encoders recurse into each level."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(one, most - 1) for one in inner)


_UNKNOWN = "unknown"
"""The name of a call that is gone, because the store no longer has its response.  The model still reads the output."""

_SERVED = (items.ShellCallOutput, items.ToolSearchOutput, items.ProgramOutput)
"""The outputs that may be this server's."""


@dataclass(frozen=True)
class ChatConversation:
    """A conversation as messages.

    ``turns`` are the tokens of the turns that the engine generated, in order.  ``images`` are data URLs in the order of
    their placeholders.  ``continues`` is True if the model is to continue the last message, and ``thinks`` if it is to
    continue the thought of that message, which has nothing else.
    """

    messages: tuple[ChatMessage, ...]
    turns: tuple[TokenIds, ...]
    images: tuple[str, ...]
    continues: bool
    thinks: bool


@dataclass(frozen=True)
class MessageContext:
    """The context that turns items into messages.

    ``images`` maps the URLs of images to data URLs.  ``stops`` are the tokens that end a turn.  ``call_id`` makes the
    ids of calls.  ``placed`` are the keys of the tools that stand where an item brings them.
    """

    request: ResolvedRequest
    names: ToolNames
    images: Mapping[str, str]
    stops: Collection[int]
    call_id: CallId = id_of_client
    placed: frozenset[ToolKey] = frozenset()


def chat_conversation(
    instructions: Sequence[str], history: Sequence[items.Item], context: MessageContext
) -> ChatConversation:
    """Lay out the messages of a prompt with these ``items`` of the conversation."""
    messages = _Messages(history, context)
    if instructions:
        messages.add({"role": "system", "content": content_of(instructions)})
    for at, item in enumerate(history):
        messages.read(item, at)
    messages.close()
    is_open = bool(history) and is_cut(history[-1])
    thinks = is_open and isinstance(history[-1], items.Reasoning)
    return ChatConversation(
        tuple(messages.added),
        tuple(messages.turns),
        tuple(messages.images),
        continues=is_open and not thinks,
        thinks=thinks and _only_thinks(messages.added[-1]),
    )


def _only_thinks(message: ChatMessage) -> bool:
    return "reasoning" in message and message["content"] is None and "tool_calls" not in message


class _Messages:
    def __init__(self, history: Sequence[items.Item], context: MessageContext) -> None:
        self.added: list[ChatMessage] = []
        self.turns: list[TokenIds] = []
        self.images: list[str] = []
        self._context = context
        self._tokens = context.request.tokens
        self._results = context.request.results
        self._history = history
        self._callers = callers_of(history)
        self._outputs = {caller: history[at] for at, caller in self._callers.items()}
        self._refusals = refusals_in(history)
        self._turn: Turn | None = None
        self._called = 0
        """The number of calls so far."""

    def add(self, message: ChatMessage) -> None:
        """Append a message that the model did not write.  It ends the model's turn."""
        self.close()
        self.added.append(message)

    def close(self) -> None:
        if self._turn:
            self.added += self._turn.messages()
            self.turns += [self._turn.tokens] if self._turn.tokens else []
        self._turn = None

    def read(self, item: items.Item, at: int) -> None:
        match item:
            case items.Message(role="assistant"):
                self._write(self._written(item).texts, [part.text for part in item.content], at)
            case items.Message():
                is_user = item.role == "user" or bool(items.images_of(item))  # no template has images in instructions
                self.add({"role": "user" if is_user else "system", "content": self._content(item.content)})
            case items.Reasoning():
                self._think(item, at)
            case items.Compaction():
                self.add({"role": "user", "content": summary_of(item, self._results)})
            case items.AdditionalTools() if declared := self._declared(item):
                self.add({"role": "system", "content": f"More tools can be called from now on:\n{declared}"})
            case _:
                self._read_call(item, at)

    def _read_call(self, item: items.Item, at: int) -> None:
        """Read an item that belongs to a call; items without a message are left out."""
        match item:
            case _ if isinstance(item, items.Call):
                self._call(item, self._outputs.get(at))
            case _ if isinstance(item, items.CallOutput):
                self._return(item, self._history[self._callers[at]] if at in self._callers else None)
            case _ if isinstance(item, items.ServedCall):
                self._run(item)
            case items.McpApprovalRequest() if refusal := self._refusals.get(item.id):
                self._add_call(self._written(item), item, item.id, refusal)  # an approved request becomes a call
            case _:
                pass

    def _declared(self, item: items.AdditionalTools | items.ToolSearchOutput) -> str:
        """Return the tools that an item brings as lines of JSON; empty if the head of the prompt declares them."""
        tools, names = self._context.request.facts.tools, self._context.names
        brought = brought_by(item, (tool for tool in tools.tools if tool_key(tool) in self._context.placed))
        return "\n".join(map(json_text, described(brought, tools.descriptions, names)))

    def _written(self, item: items.Item) -> Turn:
        """Return the turn in which the model wrote ``item``, and add the item's tokens to it."""
        if self._turn and self._turn.is_left_by(item):
            self.close()
        turn = self._turn = self._turn or Turn()
        written = self._tokens.get(item.id) or ()
        if isinstance(item, items.McpCall) and item.approval_request_id:  # the model wrote it as an approval request
            written = self._tokens.get(item.approval_request_id, written)
        turn.is_whole = turn.is_whole and bool(written)
        turn.tokens = (*turn.tokens, *written) if turn.is_whole else turn.tokens
        turn.is_over = written[-1] in self._context.stops if written else None
        return turn

    def _write(self, texts: list[list[str]], parts: list[str], at: int) -> None:
        """Add the ``parts`` of an item to the ``texts`` of its turn, or to the one that it continues."""
        if at and texts and parts and is_continuation(self._history[at], self._history[at - 1]):
            first, *others = parts
            texts[-1][-1:] = ["".join((*texts[-1][-1:], first)), *others]
        else:
            texts.append(parts)

    def _think(self, item: items.Reasoning, at: int) -> None:
        if item.text or item.id in self._tokens:
            thoughts = self._written(item).thoughts
            if item.text:
                self._write(thoughts, [item.text], at)

    def _call(self, call: items.Call, output: items.Item | None) -> None:
        """Add a call, with its output if there is one anywhere in the conversation.

        A call that was cut and has no output is left out.  The output of an asynchronous call comes at its own place.
        """
        if isinstance(call, items.FunctionCall) and call.is_async:
            turn = self._written(call)
            self._add_call(turn, call, call.call_id, PENDING)
            turn.ran = True
        elif isinstance(output, items.CallOutput):
            self._add_call(self._written(call), call, call.call_id, self._output(output, call))
        elif call.status != "incomplete":
            self._add_call(self._written(call), call, call.call_id, None)

    def _run(self, call: items.ServedCall) -> None:
        """Add a call that this server made, with its result.  A call that never ran is left out."""
        result = self._results.get(call.id)
        if result or call.status not in {"in_progress", "incomplete"}:
            turn = self._written(call)
            self._add_call(turn, call, call.id, self._result(call, result_of(call) if result is None else result))
            turn.ran = True

    def _result(self, call: items.ServedCall, text: str) -> Content:
        """Return the result of a call, with the images that it has returned if the model sees them."""
        seen = [url for url in self._context.request.returned.get(call.id, ()) if url in self._context.images]
        return self._content((items.InputText(text), *map(items.InputImage, seen))) if seen else text

    def _return(self, output: items.CallOutput, call: items.Item | None) -> None:
        """Take an output at its own place.

        It was added with its call already, unless the call is gone or asynchronous: then it follows a call once more.
        """
        again = call if isinstance(call, items.FunctionCall) and call.is_async else None
        if call is None or again:
            self.close()
            name, arguments = (self._context.names.of_call(again), again.arguments) if again else (_UNKNOWN, "")
            self._turn = Turn(is_whole=False, returned=True)
            self._pair(self._turn, name, arguments, output.call_id, self._output(output, again))
        elif self._turn and not (isinstance(output, _SERVED) and self._turn.is_over is False):
            self._turn.returned = True  # not for an output of this server's if its call did not end the turn

    def _add_call(self, turn: Turn, call: items.CallItem, call_id: str, result: Content | None) -> None:
        name, argument, text = self._context.names.of_call(call), text_argument(call), arguments_of(call)
        self._pair(turn, name, json_text({argument: text}) if argument else text, call_id, result)

    def _pair(self, turn: Turn, name: str, arguments: str, call_id: str, result: Content | None) -> None:
        """Add a call to a turn, with its result if there is one, under the id that the template shows."""
        shown = self._context.call_id(name, self._called, call_id)
        self._called += 1
        function = {"name": name, "arguments": Arguments(arguments)}
        turn.calls.append({"id": shown, "type": "function", "function": function})
        if result is not None:
            turn.results.append({"role": "tool", "tool_call_id": shown, "name": name, "content": result})

    def _output(self, output: items.CallOutput, call: items.Call | None) -> Content:
        if result := self._results.get(output.id):
            return result
        match output:
            case items.FunctionCallOutput(output=tuple(parts)) | items.CustomToolCallOutput(output=tuple(parts)):
                return self._content(parts)
            case items.ComputerCallOutput():
                return self._content(items.parts_of(output))
            case items.ToolSearchOutput():
                return self._declared(output) or found_elsewhere(output)
            case _:
                return output_of(output, call)

    def _content(self, parts: Sequence[items.MessagePart]) -> Content:
        """Return one text, or a list of parts, which the template's format of content joins or not."""
        if not any(isinstance(part, items.InputImage) for part in parts):
            return content_of([part.text for part in parts])
        return [*map(self._part, parts)]

    def _part(self, part: items.MessagePart) -> dict[str, Any]:
        if not isinstance(part, items.InputImage):
            return text_part(part.text)
        url = self._context.images[part.url]
        self.images.append(url)
        return {"type": "image_url", "image_url": {"url": url}}
