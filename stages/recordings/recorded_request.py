"""Requests as keys of recordings.

A client that runs again sends the same request, except for ids, dates and reasoning items, which not every client sends
back.  These are left out of the key.  The items and the names of the tools identify a request; all other parameters are
particulars, which decide between several matching recordings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.pipeline.frames import GenerationStarted, ResolvedRequest, ResponseStarted
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.items import InputText, Item, McpApprovalRequest, Message, Program, Reasoning
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.pipeline.protocol.response import ANSWERING, Response
from penstock.pipeline.recordings.comparison import excerpt

_CHANGING = frozenset({"id", "status", "phase", "annotations", "logprobs", "caller", "fingerprint"})
"""The fields of items that clients may change or omit when they send an item back."""

_NAMES = frozenset({"call_id", "approval_request_id", "container_id"})
"""The fields that refer to something else by id; only the equality of two references matters."""

SHOWN_CHARACTERS = 120
"""Characters of each item that an error shows."""

_DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")


@dataclass(frozen=True)
class ComparableRequest:
    """A request; ``history`` is None if it continues a conversation that was not recorded."""

    response: Response
    input: tuple[Item, ...]
    history: tuple[Item, ...] | None = ()
    stop: tuple[str, ...] = ()
    raw: RawPrompt | None = None

    @classmethod
    def of(cls, first: ResolvedRequest | GenerationStarted | ResponseStarted) -> ComparableRequest:
        """Return the request that the first frame of a recording belongs to."""
        facts = first.facts
        response = facts.response
        history: tuple[Item, ...] | None = ()
        if isinstance(first, ResolvedRequest):
            history = first.history
        elif response.previous_response_id is not None or response.conversation is not UNSET:
            history = None  # unknown
        return cls(response, input=facts.input, history=history, stop=facts.sampling.stop, raw=facts.raw)

    @cached_property
    def items(self) -> tuple[str, ...]:
        """The known items of the conversation, each as normalized JSON, or a raw prompt as the only one."""
        if self.raw is not None:
            return (msgspec.json.encode(self.raw).decode(),)
        return tuple(_normalized_json((*(self.history or ()), *self.input)))

    @property
    def text(self) -> str:
        """The text of a request that has nothing else: no history, no images and no tools; empty for other requests."""
        match self.input:
            case [Message(role="user", content=[InputText(text)])] if self.history == () and not self.tools:
                return text
            case _:
                return ""

    @property
    def last_text(self) -> str:
        """The text of the user's last message; empty if there is none."""
        items = reversed((*(self.history or ()), *self.input))
        return next((item.text for item in items if isinstance(item, Message) and item.role == "user"), "")

    @cached_property
    def tools(self) -> tuple[str, ...]:
        """The names of the tools."""
        return tuple(sorted(map(_named, self.response.tools)))

    @cached_property
    def particulars(self) -> Mapping[str, Any]:
        """The remaining parameters that may change the answer."""
        values = {name: msgspec.to_builtins(getattr(self.response, name)) for name in ANSWERING}
        return values | {"stop": self.stop}

    @property
    def keys(self) -> tuple[object, ...]:
        """The keys under which the request may have been recorded: with its history, or without it."""
        whole = (self.items, self.tools)
        return (whole, self.without_history) if self.history else (whole,)

    @property
    def key(self) -> object:
        """The key of a recording of this request."""
        return self.without_history if self.history is None else (self.items, self.tools)

    @property
    def without_history(self) -> object:
        """The key of a request whose history was not recorded."""
        return ("continued", tuple(_normalized_json(self.input)), self.tools)

    @property
    def approvals(self) -> list[str]:
        """The ids of the MCP approval requests, in order."""
        items = (*(self.history or ()), *self.input)
        return [item.id for item in items if isinstance(item, McpApprovalRequest)]

    @property
    def programs(self) -> list[str]:
        """The ``call_id`` of each program, in order."""
        items = (*(self.history or ()), *self.input)
        return [item.call_id for item in items if isinstance(item, Program)]

    def likeness(self, other: ComparableRequest) -> int:
        """Return the number of equal particulars."""
        return sum(self.particulars[name] == value for name, value in other.particulars.items())

    def difference(self, other: ComparableRequest) -> str:
        """Describe the first difference to ``other``, a recorded request."""
        for at, (item, recorded_item) in enumerate(zip(self.items, other.items, strict=False), start=1):
            if item != recorded_item:
                there, here = (
                    excerpt(recorded_item, item, SHOWN_CHARACTERS),
                    excerpt(item, recorded_item, SHOWN_CHARACTERS),
                )
                return f"its item {at} is {there}, and here it is {here}"
        if (count := len(other.items)) != len(self.items):
            return f"it has {counted(count, 'item')}, and this request has {len(self.items)}"
        if self.tools != other.tools:
            there, here = (", ".join(each.tools) or "none" for each in (other, self))
            return f"its tools are {there}, and here they are {here}"
        return "it continues a conversation that was not recorded"


def _normalized_json(items: Iterable[Item]) -> Iterator[str]:
    names: dict[str, str] = {}
    for item in items:
        if not isinstance(item, Reasoning):
            normalized = _normalized(msgspec.to_builtins(item), names)
            yield _DATE.sub("<date>", msgspec.json.encode(normalized, order="sorted").decode())


def _normalized(data: Any, names: dict[str, str]) -> Any:
    """Drop the fields that change from run to run, and number the references in the order of their appearance."""
    match data:
        case dict():
            return {
                key: names.setdefault(value, f"<{len(names) + 1}>") if key in _NAMES else _normalized(value, names)
                for key, value in data.items()
                if key not in _CHANGING and value is not None
            }
        case list() | tuple():
            return [_normalized(part, names) for part in data]
        case _:
            return data


def _named(tool: Mapping[str, Any]) -> str:
    inner = sorted(map(_named, tool.get("tools", ()))) if tool["type"] == "namespace" else ()
    name = next((str(tool[key]) for key in ("name", "server_label", "type") if tool.get(key)), "")
    return f"{name}({', '.join(inner)})" if inner else name
