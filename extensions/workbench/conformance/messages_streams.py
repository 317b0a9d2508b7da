"""Checks of the streams of the Messages API."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.extensions.workbench.conformance.check import SSE, check, fits, must, should
from penstock.extensions.workbench.conformance.client import Json, Talk
from penstock.extensions.workbench.conformance.messages import CALL, STREAMING, TOOLS
from penstock.extensions.workbench.conformance.shapes import MessagesUsage, StopReason

BLOCKS = ("content_block_start", "content_block_delta", "content_block_stop")
EVENTS = ("message_start", *BLOCKS, "message_delta", "message_stop", "ping", "error")
DELTAS = {
    "text": {"text_delta": "text", "citations_delta": "citation"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "redacted_thinking": {},
    "tool_use": {"input_json_delta": "partial_json"},
}
"""The deltas of each kind of block, with the field of each that grows."""


async def events_of(talk: Talk, **fields: Any) -> list[Json]:
    """Return the events of a stream, without the pings."""
    events = (await talk.stream(**fields)).objects
    must(events, "the stream has no events")
    return [event for event in events if event.get("type") != "ping"]


def blocks_of(events: list[Json]) -> list[tuple[Json, list[Json]]]:
    """Return the blocks of a stream as they start, each with its deltas."""
    found: list[tuple[Json, list[Json]]] = []
    for event in events:
        if event["type"] == "content_block_start":
            found.append((event["content_block"], []))
        elif event["type"] == "content_block_delta":
            found[event["index"]][1].append(event["delta"])
    return found


@check("messages", area="streams", source=SSE, core=True)
async def messages_sse(talk: Talk) -> None:
    """A stream is text/event-stream in UTF-8, each event is named by its type, and the last one is whole."""
    stream = await talk.stream()
    for event in stream.events:
        kind = msgspec.json.decode(event.data).get("type")
        must(event.name == kind, f"the event {kind!r} is named {event.name!r}")
        must(kind in EVENTS, f"the reference has no event {kind!r}")
    must(not stream.rest, f"the stream breaks off in an event: {stream.rest[:100]!r}")


@check("messages", area="streams", source=STREAMING, core=True)
async def messages_order(talk: Talk) -> None:
    """message_start comes first, then the blocks, one message_delta and one message_stop, which is the last event."""
    kinds = [event["type"] for event in await events_of(talk)]
    must(kinds[0] == "message_start", f"the first event is {kinds[0]}")
    must(kinds[-2:] == ["message_delta", "message_stop"], f"the last events are {kinds[-2:]}")
    must(all(kind in BLOCKS for kind in kinds[1:-2]), "another event stands between the blocks")


@check("messages", area="streams", source=STREAMING, core=True)
async def messages_start(talk: Talk) -> None:
    """message_start has a message without content and without stop_reason, and with its usage."""
    begun = (await events_of(talk))[0]["message"]
    beginning: Json = {"type": "message", "role": "assistant", "content": [], "stop_reason": None}
    for name, value in beginning.items():
        must(begun.get(name) == value, f"{name} is {begun.get(name)!r}")
    must(isinstance(begun.get("id"), str) and begun["id"], "the message has no id")
    must(isinstance(begun.get("model"), str), "the message has no model")
    fits(MessagesUsage, begun.get("usage"), "usage")


@check("messages", area="streams", source=STREAMING, core=True)
async def messages_blocks(talk: Talk) -> None:
    """Blocks come one after another, with indexes that count from 0, each with one start and one stop."""
    at, is_open = -1, False
    for event in await events_of(talk):
        if event["type"] not in BLOCKS:
            continue
        if event["type"] == "content_block_start":
            must(not is_open, f"block {at} has no stop")
            at, is_open = at + 1, True
        must(is_open, f"{event['type']} is of no open block")
        must(event.get("index") == at, f"{event['type']} of block {at} has the index {event.get('index')}")
        is_open = event["type"] != "content_block_stop"
    must(not is_open, f"block {at} has no stop")
    should(at >= 0, "there are no blocks")


@check("messages", area="streams", source=STREAMING, core=True)
async def messages_deltas(talk: Talk) -> None:
    """Blocks start empty, and their deltas are of their kind."""
    for block, deltas in blocks_of(await events_of(talk)):
        allowed = DELTAS.get(block["type"], {})
        for name in ("text", "thinking"):
            must(not block.get(name), f"the block {block['type']} does not start empty")
        should(block["type"] != "thinking" or "signature" in block, "a thought starts without a signature")
        for delta in deltas:
            must(delta["type"] in allowed, f"a block {block['type']} has a delta {delta['type']}")
            must(allowed[delta["type"]] in delta, f"{delta['type']} has no {allowed[delta['type']]}")
        should(deltas or block["type"] != "text", "a block of text is empty")


@check("messages", area="streams", source=STREAMING, core=True)
async def messages_end(talk: Talk) -> None:
    """message_delta has the stop_reason and the tokens of the output."""
    event = (await events_of(talk))[-2]
    fits(StopReason, event["delta"].get("stop_reason"), "stop_reason")  # type: ignore[arg-type]
    must(event["usage"]["output_tokens"] > 0, "output_tokens is 0")


@check("messages", area="streams", source=STREAMING, core=True)
async def messages_same_text(talk: Talk) -> None:
    """The deltas of a stream add up to the text of the same request without a stream."""
    whole = "".join(block.get("text", "") for block in (await talk.ask())["content"])
    streamed = "".join(delta.get("text", "") for _, deltas in blocks_of(await events_of(talk)) for delta in deltas)
    should(whole, "the model wrote no text")
    must(streamed, "the stream has no text")
    should(streamed == whole, "the text is another one, as sampling may have it")


@check("messages", area="tools", source=TOOLS, core=True)
async def messages_call_stream(talk: Talk) -> None:
    """A tool_use starts with its id, its name and an empty input, and its deltas add up to the JSON of the input."""
    events = await events_of(talk, **CALL)
    calls = [(block, deltas) for block, deltas in blocks_of(events) if block["type"] == "tool_use"]
    end = events[-2]["delta"].get("stop_reason")
    should(calls or end != "max_tokens", "the answer was cut before its end: see --max-tokens")
    must(calls, "there is no tool_use")
    block, deltas = calls[0]
    must(block.get("id") and block.get("name") == "get_weather", "the block has no id or no name")
    must(block.get("input") == {}, f"the block starts with the input {block.get('input')!r}")
    should(end != "max_tokens", "the answer was cut before its end: see --max-tokens")
    written = "".join(delta.get("partial_json", "") for delta in deltas)
    found = msgspec.json.decode(written or "{}")
    must(set(found) == {"city"} and isinstance(found["city"], str), f"the input is not of the schema: {written}")
    must(end == "tool_use", f"stop_reason is {end}")
