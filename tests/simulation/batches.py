"""Clients of both batch APIs: they create batches, cancel and delete them, and read their results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from tests.simulation.children import MODEL_NAMES
from tests.simulation.clients import BUSY, PAUSE, Broken, Client, Json
from tests.simulation.engine import count_to
from tests.simulation.files import uploaded
from tests.simulation.ledger import KnownBatch, LineEnd, Sum, Violation
from tests.simulation.scripts import Script

MESSAGES = "/v1/messages"

BASES = {"openai": "/v1/batches", "anthropic": "/v1/messages/batches"}
"""The URL of the batches of each API."""

_CODES = {"batch_cancelled": "cancelled", "batch_expired": "expired"}
_TYPES = {"canceled": "cancelled"}
"""The kinds of results that have another name in an API."""


async def batch(client: Client) -> None:
    """Have the lines of a file answered, by OpenAI's API."""
    endpoint = client.draw.choice(("/v1/responses", "/v1/chat/completions"))
    lines = _lines(client, endpoint)
    text = "\n".join(
        json.dumps({"custom_id": name, "method": "POST", "url": endpoint, "body": _body(client, endpoint, wanted)})
        for name, wanted in lines.items()
    )
    if (file := await uploaded(client, text.encode(), "batch")) is not None:
        body = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
        await _batched(client, "openai", lines, body)


async def message_batch(client: Client) -> None:
    """Have messages answered, by Anthropic's API."""
    lines = _lines(client, MESSAGES)
    requests = [{"custom_id": name, "params": _body(client, MESSAGES, wanted)} for name, wanted in lines.items()]
    await _batched(client, "anthropic", lines, {"requests": requests})


def _lines(client: Client, endpoint: str) -> dict[str, Json]:
    """Return what the engine shall do for each line; nothing for lines that are wrong."""
    lines: dict[str, Json] = {}
    for number in range(client.draw.choice((1, 3, 8, 20))):
        wanted = {
            "nonce": client.nonce(),
            "last": str(client.draw.choice((1, 3, 12, 40))),
            "seconds": str(client.draw.choice((0, 0.01, 0.2))),
            "line": "yes",
        }
        if client.world.plan.has_models:
            wanted["model"] = client.draw.choice(MODEL_NAMES)
        lines[f"line-{number}"] = {} if client.draw.random() < 0.05 else wanted
    return lines


def _body(client: Client, endpoint: str, wanted: Json) -> Json:
    """Return the request of a line."""
    model = {"model": wanted.get("model", MODEL_NAMES[0])}
    if endpoint == "/v1/responses":
        stored = {"store": client.draw.random() < 0.5}
        return model | stored | ({"input": "Count.", "metadata": wanted} if wanted else {"input": 1})
    content = [{"role": "user", "content": json.dumps(wanted)}] if wanted else 1
    return model | {"messages": content} | ({"max_tokens": 1000} if endpoint == MESSAGES else {})


async def _batched(client: Client, api: str, lines: Mapping[str, Json], body: Json) -> None:
    known = await _created(client, api, lines, body)
    if known is None:
        return
    if client.draw.random() < 0.4:
        await asyncio.sleep(client.draw.choice((0.0, 0.1, 1.0, 4.0)))
        await _cancel(client, known)
    while (answer := await _read(client, known)) and not has_ended(known, answer):
        await asyncio.sleep(client.draw.choice((0.1, 1.0)))
    for other in [each for each in client.world.ledger.batches.values() if each.owner != client.owner]:
        path = _path(other)
        await client.refused_all(("GET", path), ("POST", f"{path}/cancel"))
    if answer:
        check_batch(known, answer, await results_of(client, known, answer, client.url("")))
    if api == "anthropic" and client.draw.random() < 0.3:
        known.deleting = True
        status, answer = await client.insist("DELETE", _path(known))
        if status not in (200, 404):
            raise Violation(f"deleting {known.id} was answered with {status} {answer}")
        known.deleted = status == 200


async def _created(client: Client, api: str, lines: Mapping[str, Json], body: Json) -> KnownBatch | None:
    """Create a batch; return None if the client does not know that."""
    while True:
        try:
            status, answer = await client.once("POST", BASES[api], body)
        except Broken:
            return None
        if status == 200:
            known = KnownBatch(answer["id"], client.owner, api, dict(lines))
            if client.world.ledger.batches.setdefault(known.id, known) is not known:
                raise Violation(f"{known.id} was created twice")
            return known
        if status not in BUSY:
            raise Violation(f"a batch was answered with {status} {answer}")
        await asyncio.sleep(PAUSE * 4)


async def _cancel(client: Client, known: KnownBatch) -> None:
    known.cancelling = True
    status, answer = await client.insist("POST", f"{_path(known)}/cancel", {})
    if status == 200:
        known.cancelled_at = client.world.loop.time()
    elif status not in (400, 409):  # it has ended
        raise Violation(f"cancelling {known.id} was answered with {status} {answer}")


async def _read(client: Client, known: KnownBatch) -> Json | None:
    status, answer = await client.insist("GET", _path(known))
    if status != 200:
        raise Violation(f"{known.id} was created, and is answered with {status} {answer}")
    if known.ends and answer != known.ends[-1]:
        raise Violation(f"{known.id} had ended as {known.ends[-1]}, and is {answer}")
    if has_ended(known, answer):
        known.ends.append(answer)
    return answer


def _path(known: KnownBatch) -> str:
    return f"{BASES[known.api]}/{known.id}"


def has_ended(known: KnownBatch, answer: Json) -> bool:
    """Return True if a batch will not change any more."""
    if known.api == "anthropic":
        return bool(answer["processing_status"] == "ended")
    return answer["status"] in ("failed", "completed", "expired", "cancelled")


# Results


async def results_of(client: Client, known: KnownBatch, answer: Json, url: str) -> list[LineEnd]:
    """Return the results of a batch that has ended, from the server at a URL, or any if it is not there."""
    if known.api == "anthropic":
        paths = [f"{_path(known)}/results"]
    else:
        named = (answer["output_file_id"], answer["error_file_id"])
        paths = [f"/v1/files/{file}/content" for file in named if file]
    ends: list[LineEnd] = []
    for path in paths:
        content = await _content(client, url, path)
        ends += map(_openai_end if known.api == "openai" else _anthropic_end, map(json.loads, content.splitlines()))
    return ends


async def _content(client: Client, url: str, path: str) -> bytes:
    while True:
        try:
            async with client.http.get(url + path) as answer:
                client.check_status(answer.status, path)
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            url = client.url("")
        else:
            if answer.status == 200:
                return content
            if answer.status not in BUSY:
                raise Violation(f"{path} was answered with {answer.status} {content[:300]!r}")
        await asyncio.sleep(PAUSE)


def _openai_end(line: Json) -> LineEnd:
    if line["response"] is None:
        return LineEnd(line["custom_id"], _CODES[line["error"]["code"]])
    status, body = line["response"]["status_code"], line["response"]["body"]
    if status != 200:
        return LineEnd(line["custom_id"], "errored", str(body))
    if body["object"] == "response":
        return LineEnd(line["custom_id"], "succeeded", _text(body["output"]), Sum.of_response(body))
    used, text = body["usage"], body["choices"][0]["message"]["content"]
    cached = used["prompt_tokens_details"]["cached_tokens"]
    reasoning = used["completion_tokens_details"]["reasoning_tokens"]
    counts = Sum(1, used["prompt_tokens"], cached, used["completion_tokens"], reasoning)
    return LineEnd(line["custom_id"], "succeeded", text, counts)


def _text(output: Iterable[Json]) -> str:
    parts = (part for item in output if item["type"] == "message" for part in item["content"])
    return "".join(part["text"] for part in parts)


def _anthropic_end(line: Json) -> LineEnd:
    result: Json = line["result"]
    kind = _TYPES.get(result["type"], str(result["type"]))
    if kind != "succeeded":
        return LineEnd(line["custom_id"], kind, str(result.get("error", "")))
    used, content = result["message"]["usage"], result["message"]["content"]
    cached = used.get("cache_read_input_tokens") or 0
    text = "".join(part["text"] for part in content if part["type"] == "text")
    return LineEnd(line["custom_id"], kind, text, Sum(1, used["input_tokens"] + cached, cached, used["output_tokens"]))


def check_batch(known: KnownBatch, answer: Json, ends: list[LineEnd]) -> None:
    """Check that each line of a batch that has ended has one result, its own, and that the counts are theirs."""
    names = [end.custom_id for end in ends]
    is_early = not names and (known.cancelling or _is_elsewhere(known)) and not any(_counts(known, answer))
    if sorted(names) != sorted(known.lines) and not is_early:
        raise Violation(f"{known.id} has the lines {sorted(known.lines)}, and results of {sorted(names)}: {answer}")
    for end in ends:
        _check_line(known, end)
    counted = tuple(sum(end.kind == kind for end in ends) for kind in ("succeeded", "errored", "cancelled"))
    if _counts(known, answer) != counted:
        raise Violation(f"{known.id} has {counted} results, and counts {answer}")
    known.used = sum_of(end.used for end in ends)
    if known.api == "openai" and (used := Sum.of_response(answer)._replace(requests=known.used.requests)) != known.used:
        raise Violation(f"the lines of {known.id} have used {known.used}, and it says {used}")


def _is_elsewhere(known: KnownBatch) -> bool:
    """Return True if not every server has all models of a batch: one that has not refuses them."""
    return any(wanted.get("model", MODEL_NAMES[0]) != MODEL_NAMES[0] for wanted in known.lines.values())


def sum_of(uses: Iterable[Sum]) -> Sum:
    """Return a sum of sums."""
    total = Sum()
    for use in uses:
        total = total.plus(use)
    return total


def _check_line(known: KnownBatch, end: LineEnd) -> None:
    wanted = known.lines[end.custom_id]
    match end.kind:
        case "succeeded" if wanted and end.text == count_to(int(wanted["last"])):
            pass
        case "errored" if not wanted or ("This server serves" in end.text and _is_elsewhere(known)):
            pass
        case "cancelled" if known.cancelling:
            pass
        case _:
            raise Violation(f"{end.custom_id} of {known.id} is {end.kind} with {end.text!r}, wanted was {wanted}")


def _counts(known: KnownBatch, answer: Json) -> tuple[int, ...]:
    """Return the numbers of lines that have succeeded, that have an error, and that did not run."""
    counts: dict[str, Any] = answer["request_counts"]
    if known.api == "anthropic":
        return counts["succeeded"], counts["errored"], counts["canceled"]
    succeeded, errored = counts["completed"], counts["failed"]
    return succeeded, errored, counts["total"] - succeeded - errored


async def check_everywhere(client: Client, known: KnownBatch) -> None:
    """Check that all servers agree on a batch and its results, with all that clients were told of its end."""
    for server in client.world.servers:
        async with client.http.get(server.url + _path(known)) as answered:
            answer: Json = await answered.json()
        if answered.status == 404 and known.deleting:
            continue
        if answered.status != 200 or known.deleted or not has_ended(known, answer):
            raise Violation(f"{known.id} is answered with {answered.status} {answer} at the end by {server.host}")
        if any(end != answer for end in known.ends):
            raise Violation(f"{known.id} had ended as {known.ends}, and is {answer} at {server.host}")
        known.ends.append(answer)
        check_batch(known, answer, await results_of(client, known, answer, server.url))


SCRIPTS: Mapping[str, Script] = {"batch": batch, "message batch": message_batch}
