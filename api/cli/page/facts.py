"""The facts of a recorded response: its request parameters, its times, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.api.cli.page.flow import Flow
from penstock.api.cli.story import speed_of
from penstock.pipeline.frames import GenerationFinished, TurnFinished
from penstock.pipeline.secret import unwritten

Fact = tuple[str, str]

ASKED = ("temperature", "top_p", "max_output_tokens", "tool_choice", "truncation", "top_logprobs", "service_tier")
"""The request parameters that are shown unless they have their usual value."""
USUAL = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "truncation": "disabled", "service_tier": "default"}


def facts_of(flow: Flow) -> list[Fact]:
    """Return the facts at the top of the page, in order."""
    return [*_ending(flow), *_times(flow), *_counts(flow), *_origin(flow)]


def request_of(flow: Flow) -> dict[str, Any]:
    """Return the request parameters that differ from their defaults, and the names of the tools."""
    response = _response(flow)
    params = {name: response[name] for name in ASKED if response.get(name) not in (None, 0, USUAL.get(name))}
    if effort := (response.get("reasoning") or {}).get("effort"):
        params["reasoning.effort"] = effort
    if (form := (response.get("text") or {}).get("format", {}).get("type", "text")) != "text":
        params["text.format"] = form
    if response.get("instructions"):
        params["instructions"] = response["instructions"]
    if tools := response.get("tools"):
        params["tools"] = ", ".join(str(tool.get("name") or tool.get("server_label") or tool["type"]) for tool in tools)
    return params


def _response(flow: Flow) -> dict[str, Any]:
    """Return the response of the first recorded frame that has one, as JSON values; empty if there is none."""
    files = flow.files
    frames = (
        frame
        for stage in ("normalize", "render", "generate", "converse", "parse", "emit")
        if stage in files
        for frame in files[stage].frames
    )
    for frame in frames:
        if hasattr(frame, "response"):
            response: dict[str, Any] = msgspec.to_builtins(frame.response, enc_hook=unwritten)
            return response
    return {}


def _ending(flow: Flow) -> Iterator[Fact]:
    last = next((each.frame.response for each in reversed(flow.events) if hasattr(each.frame, "response")), None)
    if last is None:
        return
    why = f" ({last.incomplete_details.reason})" if last.incomplete_details else ""
    yield "Status", f"{last.status}{why}"
    if usage := last.usage:
        cached = usage.input_tokens_details.cached_tokens
        thought = usage.output_tokens_details.reasoning_tokens
        yield "Input", f"{usage.input_tokens:,} tokens" + (f", {cached:,} cached" if cached else "")
        yield "Output", f"{usage.output_tokens:,} tokens" + (f", {thought:,} of thought" if thought else "")


def _times(flow: Flow) -> Iterator[Fact]:
    """Yield the times and the speed, as far as they were recorded."""
    if speed := speed_of(flow.tokens):
        yield "First token", _seconds(speed.first)
        if speed.rate is not None:
            yield "Speed", f"{speed.rate:,.1f} tokens/s"
    elif spent := sum(each.frame.duration for each in flow.tokens if isinstance(each.frame, GenerationFinished)):
        yield "Generation", _seconds(spent)
    if ends := [each.at for each in flow.events if each.at is not None]:
        yield "Total", _seconds(ends[-1])


def _counts(flow: Flow) -> Iterator[Fact]:
    turns = sum(isinstance(each.frame, TurnFinished) for each in flow.items)
    if turns > 1:
        yield "Turns", str(turns)
    if flow.events:
        yield "Events", f"{len(flow.events):,}"


def _origin(flow: Flow) -> Iterator[Fact]:
    header = flow.header
    if model := header.model or _response(flow).get("model"):
        yield "Model", str(model)
    yield "Encoding", header.encoding
    if header.source:
        yield "Source", header.source
    if header.versions:
        yield "Versions", ", ".join(f"{name} {version}" for name, version in header.versions.items())
    if header.recorded_at:
        yield "Recorded", header.recorded_at


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"
