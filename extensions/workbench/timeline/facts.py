"""The facts of a recorded response: its result, its times, its origin, and its request parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.extensions.workbench.timeline.timeline import Timeline
from penstock.pipeline.frames import GenerationFinished, ItemClosed, RequestFacts, TokenChunk, TurnFinished
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.items import InputText, Message
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.response import ANSWERING
from penstock.pipeline.secret import unwritten
from penstock.pipeline.trace import Crossing

Fact = tuple[str, str]

PLAIN = {name: value for name, value in ANSWERING.items() if name not in ("instructions", "tools", "text", "reasoning")}
"""The request parameters that are shown as they are, unless they have these values."""


BROKEN_OFF = "broken off"
"""The status of a response whose recording has no last event: it is over, though the events say that it runs."""


DETAILS = frozenset({"Turns", "Events", "Encoding", "Source", "Answered from", "Versions", "Recorded", "Response"})
"""The facts that say where a recording comes from; all others say how it went."""

LONGEST_TITLE = 80
"""Characters of a title that is taken from a request."""


def title_of(timeline: Timeline, name: str) -> str:
    """Return the last message of the user if a recording is named by its id; else its own name."""
    if not name.startswith(_response(timeline).get("id") or "\0"):
        return name
    texts = [
        part.text
        for facts in _facts(timeline)[:1]
        for item in facts.input
        if isinstance(item, Message) and item.role == "user"
        for part in item.content
        if isinstance(part, InputText)
    ]
    message = " ".join(texts[-1].split()) if texts else ""
    return shortened(message, LONGEST_TITLE) if message else f"A response of {timeline.header.model or 'a model'}"


def facts_of(timeline: Timeline) -> list[Fact]:
    """Return the name and the value of each fact, in order."""
    return [*_result(timeline), *_times(timeline), *_counts(timeline), *_origin(timeline)]


def request_of(timeline: Timeline) -> dict[str, Any]:
    """Return the request parameters that differ from their defaults, and the names of the tools."""
    response = _response(timeline)
    params = {name: response[name] for name, default in PLAIN.items() if response.get(name) not in (None, default)}
    if effort := (response.get("reasoning") or {}).get("effort"):
        params["reasoning.effort"] = effort
    if (form := (response.get("text") or {}).get("format", {}).get("type", "text")) != "text":
        params["text.format"] = form
    if response.get("instructions"):
        params["instructions"] = response["instructions"]
    if tools := response.get("tools"):
        params["tools"] = ", ".join(str(tool.get("name") or tool.get("server_label") or tool["type"]) for tool in tools)
    return params


def _response(timeline: Timeline) -> dict[str, Any]:
    frames = (crossing.frame for junction in timeline.junctions for crossing in junction.crossings)
    responses = (getattr(getattr(frame, "facts", frame), "response", None) for frame in frames)
    response = next((response for response in responses if response is not None), None)
    fields: dict[str, Any] = {} if response is None else msgspec.to_builtins(response, enc_hook=unwritten)
    return fields


def _facts(timeline: Timeline) -> list[RequestFacts]:
    frames = (crossing.frame for junction in timeline.junctions for crossing in junction.crossings)
    return [frame.facts for frame in frames if hasattr(frame, "facts")]


def _result(timeline: Timeline) -> Iterator[Fact]:
    last = next((each.frame.response for each in reversed(timeline.events) if hasattr(each.frame, "response")), None)
    if last is None:
        return
    reason = last.incomplete_details.reason if last.incomplete_details else ""
    reason = f"{last.error.code}: {last.error.message}" if last.error else reason
    status = BROKEN_OFF if last.status in ("queued", "in_progress") else last.status
    yield "Status", f"{status} ({reason})" if reason else status
    if usage := last.usage:
        cached = usage.input_tokens_details.cached_tokens
        thought = usage.output_tokens_details.reasoning_tokens
        yield "Input", counted(usage.input_tokens, "token", ",") + (f", {cached:,} cached" if cached else "")
        yield "Output", counted(usage.output_tokens, "token", ",") + (f", {thought:,} of reasoning" if thought else "")


def _times(timeline: Timeline) -> Iterator[Fact]:
    yield from speed_of(timeline.tokens)
    finished = [each.frame for each in timeline.tokens if isinstance(each.frame, GenerationFinished)]
    if not any(each.at is not None for each in timeline.tokens) and (spent := sum(each.duration for each in finished)):
        yield "Generation", _seconds(spent)
    if ends := [each.at for each in timeline.events if each.at is not None]:
        yield "Total", _seconds(ends[-1])


def speed_of(tokens: list[Crossing]) -> Iterator[Fact]:
    """Yield the time of the first token, and the tokens per second after its chunk, as far as times were recorded."""
    chunks = [
        (each.at, len(each.frame.token_ids))
        for each in tokens
        if isinstance(each.frame, TokenChunk) and each.at is not None
    ]
    if chunks:
        first, last = chunks[0][0], chunks[-1][0]
        yield "First token", _seconds(first)
        if last > first:
            yield "Speed", f"{sum(count for _, count in chunks[1:]) / (last - first):,.1f} tokens/s"


def _counts(timeline: Timeline) -> Iterator[Fact]:
    turns = sum(isinstance(each.frame, TurnFinished) for each in timeline.items)
    if turns > 1:
        yield "Turns", str(turns)
    if timeline.events:
        yield "Events", f"{len(timeline.events):,}"
    closed = (each.frame for each in timeline.items if isinstance(each.frame, ItemClosed | TurnFinished))
    if repairs := Counter(repair for frame in closed for repair in frame.repairs):
        yield "Repairs", ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in repairs.items())


def _origin(timeline: Timeline) -> Iterator[Fact]:
    header, response = timeline.header, _response(timeline)
    if model := header.model or response.get("model"):
        yield "Model", str(model)
    yield "Encoding", header.encoding
    if header.source:
        yield "Source", header.source
    if header.answered_from:
        yield "Answered from", header.answered_from
    if header.versions:
        yield "Versions", ", ".join(f"{name} {version}" for name, version in header.versions.items())
    if header.recorded_at:
        yield "Recorded", header.recorded_at
    if response.get("id"):
        yield "Response", response["id"]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"
