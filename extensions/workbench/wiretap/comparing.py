"""Differences between two answers to one request, event by event: kinds of events, their order, fields and types.

Ids, times and numbers that change from run to run do not count, nor how a text is cut into pieces.  Texts count only if
the request leaves no choice between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from penstock.pipeline.recordings.comparison import excerpt
from penstock.pipeline.recordings.wire import WireBody, WireEvent, WireFrame

LITERAL = frozenset(
    {"type", "role", "object", "status", "finish_reason", "stop_reason", "name", "phase", "code", "reason"}
    | {"prompt_tokens", "input_tokens"}
)
"""Keys whose values are compared; of all others, only the types are."""

TEXTS = frozenset(
    {
        "content",
        "text",
        "delta",
        "reasoning",
        "reasoning_content",
        "thinking",
        "partial_json",
        "arguments",
        "refusal",
        "input",
    }
)
"""Keys of what the model has written."""

ALIASES = {"reasoning_content": "reasoning"}
"""Keys of Chat Completions that two servers spell differently, as far as the kind of a chunk is concerned."""

AT_ONCE = ("role", "reasoning", "content", "text", "refusal", "tool_calls", "function_call", "finish_reason", "usage")
"""The parts of a chunk of Chat Completions, which may come at once, in the order in which a model writes them."""

OPAQUE = frozenset({"input", "arguments", "parameters", "input_schema", "schema", "metadata", "logit_bias", "logprobs"})
"""Keys of objects and lists that are not looked into: what they hold depends on the request or on chance."""

IDS = frozenset({"token_ids", "prompt_token_ids"})
"""Keys of the ids of tokens, which do not count: a recorded request may have lost the field that asks for them."""

LONGEST_TEXT = 60
"""Characters of a text that are shown."""

KEEP_ALIVE = "ping"


@dataclass
class Unit:
    """Consecutive events of one kind: for each path to a value, what stands there, and the texts."""

    kind: str
    fields: dict[str, set[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, data: Any) -> None:
        """Add the fields of an event."""
        for path, key, value in _leaves(data):
            self.fields.setdefault(path, set()).add(_token(key, value))
            if key in TEXTS and isinstance(value, str):
                self.texts[path] = self.texts.get(path, "") + value


@dataclass(frozen=True)
class Difference:
    """A difference: ``order``, ``field`` or ``text``, the kind of the events, and what it is."""

    what: str
    kind: str
    problem: str


def differences(recorded: Iterable[WireFrame], other: Iterable[WireFrame], *, with_texts: bool) -> list[Difference]:
    """Return what differs, each difference once."""
    mine, others = list(_units(recorded)), list(_units(other))
    found: dict[Difference, None] = {}
    matcher = SequenceMatcher(None, [unit.kind for unit in mine], [unit.kind for unit in others], autojunk=False)
    for tag, start, end, start_there, end_there in matcher.get_opcodes():
        if tag == "equal":
            for unit, there in zip(mine[start:end], others[start_there:end_there], strict=True):
                found |= dict.fromkeys(_of_units(unit, there, with_texts=with_texts))
        else:
            found |= dict.fromkeys(Difference("order", unit.kind, "only recorded") for unit in mine[start:end])
            found |= dict.fromkeys(
                Difference("order", unit.kind, "not recorded") for unit in others[start_there:end_there]
            )
    return list(found)


def _of_units(unit: Unit, there: Unit, *, with_texts: bool) -> Iterator[Difference]:
    for path in unit.fields | there.fields:
        tokens, tokens_there = (each.fields.get(path, set()) - {"null"} for each in (unit, there))
        if tokens and not tokens_there:
            yield Difference("field", unit.kind, f"{path}: only recorded ({_words(tokens)})")
        elif tokens_there and not tokens:
            yield Difference("field", unit.kind, f"{path}: not recorded ({_words(tokens_there)})")
        elif tokens != tokens_there:
            yield Difference("field", unit.kind, f"{path}: {_words(tokens)} != {_words(tokens_there)}")
    if with_texts:
        for path in unit.texts.keys() & there.texts.keys():
            text, text_there = unit.texts[path], there.texts[path]
            if text != text_there:
                shown = [excerpt(one, two, LONGEST_TEXT) for one, two in ((text, text_there), (text_there, text))]
                yield Difference("text", unit.kind, f"{path}: {' != '.join(shown)}")


def _units(frames: Iterable[WireFrame]) -> Iterator[Unit]:
    """Yield the events of an answer, or the parts of its body, with consecutive ones of one kind as one."""
    unit: Unit | None = None
    for kind, data in _events(frames):
        if unit is None or kind not in (unit.kind, CHUNK):
            if unit is not None:
                yield unit
            unit = Unit(kind)
        unit.add(data)
    if unit is not None:
        yield unit


CHUNK = "chunk"
"""The kind of a chunk that says nothing: it belongs to those before it."""


def _events(frames: Iterable[WireFrame]) -> Iterator[tuple[str, Any]]:
    for frame in frames:
        if isinstance(frame, WireBody):
            yield from _parts(frame.data if isinstance(frame.data, dict) else {"text": frame.text})
        elif isinstance(frame, WireEvent):
            if not isinstance(frame.data, dict):
                yield str(frame.text or "event"), {}
            elif isinstance(choices := frame.data.get("choices"), list):
                yield from _chunks(frame.data, [each for each in choices if isinstance(each, dict)])
            elif frame.data.get("type") != KEEP_ALIVE:
                yield _kind(frame), frame.data


def _parts(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a body without its items, and each item."""
    listed = {key: value for key, value in body.items() if key in ("output", "content") and isinstance(value, list)}
    yield "body", {key: value for key, value in body.items() if key not in listed}
    for key, items in listed.items():
        for item in items:
            yield f"{key} {item.get('type')}" if isinstance(item, dict) else key, item


def _kind(event: WireEvent) -> str:
    data: Mapping[str, Any] = event.data  # type: ignore[assignment]  # an object, as the caller has seen
    inner = [data[key] for key in ("item", "part", "content_block", "delta") if isinstance(data.get(key), dict)]
    types = [str(each["type"]) for each in inner if "type" in each]
    return " ".join([str(data.get("type") or event.event or "event"), *types])


def _chunks(data: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield what a chunk says one by one: what a server says at once differs from run to run."""
    said = {name for choice in choices for name in _said(choice)}
    said |= {"usage"} if data.get("usage") and not choices else set()
    for name in sorted(said, key=lambda name: (*AT_ONCE, name).index(name)) or ("",):
        kind = f"{CHUNK} {name}" if name else CHUNK
        yield kind, {**data, "choices": [_only(choice, name) for choice in choices]}


def _only(choice: Mapping[str, Any], said: str) -> dict[str, Any]:
    """Return a choice of a chunk without what else it says."""
    only = {**choice, "finish_reason": choice.get("finish_reason") if said == "finish_reason" else None}
    if isinstance(delta := choice.get("delta"), dict):
        only["delta"] = {name: value for name, value in delta.items() if value and ALIASES.get(name, name) == said}
    elif said != "text":
        only["text"] = None
    return only


def _said(choice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what a choice of a chunk says."""
    delta = choice.get("delta") or {"text": choice.get("text")}
    if isinstance(delta, dict):
        yield from (ALIASES.get(str(name), str(name)) for name, value in delta.items() if value)
    if choice.get("finish_reason"):
        yield "finish_reason"


def _leaves(value: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield each value in JSON with its path and its key; a list counts as all its elements, by their types."""
    if key in IDS:
        return
    if isinstance(value, dict) and value and key not in OPAQUE:
        for name, each in value.items():
            yield from _leaves(each, f"{path}.{name}" if path else name, name)
    elif isinstance(value, list) and value and key not in OPAQUE:
        for each in value:
            kind = each.get("type", "") if isinstance(each, dict) else ""
            yield from _leaves(each, f"{path}[{kind}]", key)
    else:
        yield path, key, value


def _token(key: str, value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str() | int() | float() if key in LITERAL:
            return repr(value)
        case str():
            return "a text"
        case int() | float():
            return "a number"
        case dict():
            return "an object"
        case _:
            return "a list"


def _words(tokens: Iterable[str]) -> str:
    return " or ".join(sorted(tokens))


def count(found: Sequence[Difference], what: str) -> int:
    """Return the number of differences of a kind."""
    return sum(difference.what == what for difference in found)
