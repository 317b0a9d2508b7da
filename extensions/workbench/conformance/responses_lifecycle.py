"""Checks of what the Responses API does with a response after it was created."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from penstock.extensions.workbench.conformance.check import Lacking, Limited, Violation, check, must, should
from penstock.extensions.workbench.conformance.client import LONG, UNKNOWN, Answer, Json, Talk, check_read
from penstock.extensions.workbench.conformance.errors import problem
from penstock.pipeline.protocol.events import TERMINAL_TYPES

RETRIEVE = "OpenAI: API reference, get, delete and cancel a model response"
STATE = "OpenAI: guide to conversation state"
BACKGROUND = "OpenAI: guide to background mode"
ENDED = ("completed", "incomplete", "failed", "cancelled")

POLLS, PAUSE = 120, 0.25
"""The times that a background response is retrieved, and the seconds between two of them."""


def _at(response: Json, rest: str = "") -> str:
    return f"/responses/{quote(str(response['id']), safe='')}{rest}"


def _stored(answer: Answer) -> Json:
    """Return what is stored; a server without a store answers that nothing is."""
    if answer.status == 404:
        raise Lacking("the server does not keep the response")
    return answer.accepted()


async def _kept(talk: Talk, **fields: Any) -> Json:
    """Create a response, and raise `Lacking` if the server does not keep it."""
    response = await talk.ask(store=True, **fields)
    _stored(await talk.send("GET", _at(response)))
    return response


@check("responses", area="lifecycle", source=RETRIEVE)
async def responses_retrieve(talk: Talk) -> None:
    """GET returns a stored answer as it was created."""
    response = await talk.ask(store=True)
    found = _stored(await talk.send("GET", _at(response)))
    for name in ("id", "status", "model", "output", "usage", "created_at"):
        must(found.get(name) == response.get(name), f"{name} is another one")


@check("responses", area="lifecycle", source=RETRIEVE)
async def responses_unknown_id(talk: Talk) -> None:
    """The id of no response is a 404 with an error object."""
    await _kept(talk)
    problem(await talk.send("GET", "/responses/resp_00000000000000000000000000000000"), 404)


@check("responses", area="lifecycle", source=RETRIEVE)
async def responses_delete(talk: Talk) -> None:
    """DELETE removes an answer, which is then a 404."""
    response = await _kept(talk)
    found = (await talk.send("DELETE", _at(response))).accepted()
    must(found.get("id") == response["id"], "the answer has another id")
    must(found.get("deleted") is True, "deleted is not true")
    problem(await talk.send("GET", _at(response)), 404)


@check("responses", area="lifecycle", source=RETRIEVE)
async def responses_input_items(talk: Talk) -> None:
    """input_items lists the input of a response."""
    response = await _kept(talk)
    found = _stored(await talk.send("GET", _at(response, "/input_items")))
    must(found.get("object") == "list", f"object is {found.get('object')!r}")
    must([item["role"] for item in found["data"]] == ["user"], "the list is not the message of the user")
    must("has_more" in found, "the list has no has_more")


@check("responses", area="lifecycle", source=STATE)
async def responses_previous(talk: Talk) -> None:
    """previous_response_id continues a response: its input and output come before the new input."""
    first = await _kept(talk, input=LONG)
    second = await talk.ask(previous_response_id=first["id"])
    must(second.get("previous_response_id") == first["id"], "the response does not name the previous one")
    check_read(second["usage"]["input_tokens"], "the previous response")


@check("responses", area="lifecycle", source=STATE)
async def responses_unknown_previous(talk: Talk) -> None:
    """A previous_response_id of no response is a 400 or a 404."""
    found = problem(await talk.try_ask(previous_response_id="resp_00000000000000000000000000000000"), 400, 404)
    should(found.code == "previous_response_not_found", f"code is {found.code!r}, not 'previous_response_not_found'")


@check("responses", area="lifecycle", source=RETRIEVE)
async def responses_not_stored(talk: Talk) -> None:
    """An answer with store false cannot be retrieved."""
    await _kept(talk)
    response = await talk.ask(store=False)
    must(response.get("store") in (None, False), "store of the response is not false")
    answer = await talk.send("GET", _at(response))
    must(answer.status != 200, "the response was kept")


@check("responses", area="lifecycle", source=STATE)
async def responses_conversation(talk: Talk) -> None:
    """A conversation gives a response its history, and receives its input and output."""
    made = (await talk.send("POST", "/conversations", {})).accepted()
    must(made.get("object") == "conversation", f"object is {made.get('object')!r}")
    path = f"/conversations/{quote(str(made['id']), safe='')}"
    try:
        first = await talk.ask(conversation=made["id"], input=LONG)
        must((first.get("conversation") or {}).get("id") == made["id"], "the response does not name its conversation")
        second = await talk.ask(conversation=made["id"])
        check_read(second["usage"]["input_tokens"], "the conversation")
        listed = (await talk.send("GET", f"{path}/items?limit=100&order=asc")).accepted()
        roles = [item.get("role") for item in listed["data"] if item["type"] == "message"]
        must(roles.count("user") == 2, f"the conversation has {roles.count('user')} messages of the user, not 2")
    finally:
        with suppress(Violation, Limited):  # as the check is about what came before
            await talk.server.talk(talk.speech).send("DELETE", path)


async def _ended(talk: Talk, response: Json) -> Json:
    found = response
    for _ in range(POLLS):
        found = _stored(await talk.send("GET", _at(response)))
        if found["status"] in ENDED:
            return found
        await asyncio.sleep(PAUSE)
    raise Violation(f"the response is {found['status']} after {POLLS * PAUSE:g} s")


async def _begun(talk: Talk, **fields: Any) -> Json:
    """Begin a background response."""
    response = await talk.ask(background=True, store=True, **fields)
    if response.get("background") is not True:
        raise Lacking("the server ignores background")
    return response


@check("responses", area="lifecycle", source=BACKGROUND)
async def responses_background(talk: Talk) -> None:
    """A background response is returned at once, queued or in progress, and ends by itself."""
    response = await _begun(talk)
    must(response["status"] in ("queued", "in_progress"), f"the status is {response['status']}")
    must((await _ended(talk, response))["status"] in ("completed", "incomplete"), "the response did not complete")


@check("responses", area="lifecycle", source=BACKGROUND)
async def responses_resume(talk: Talk) -> None:
    """A background stream is read again from the event after starting_after on, and is the same."""
    body = talk.body(background=True, store=True, stream=True)
    stream = await talk.open_stream("POST", talk.path, body)
    if stream.answer.status != 200:
        stream.answer.accepted()
    events = stream.objects
    must(len(events) > 3, "the stream has hardly any events")
    if (response := events[0]["response"]).get("background") is not True:
        raise Lacking("the server ignores background")
    after = events[2]["sequence_number"]
    again = await talk.open_stream("GET", _at(response, f"?stream=true&starting_after={after}"))
    if again.answer.status != 200:
        _stored(again.answer)
    must(again.objects == events[3:], "the stream is another one when it is resumed")


@check("responses", area="lifecycle", source=BACKGROUND)
async def responses_cut_stream(talk: Talk) -> None:
    """A background response goes on after its client has left the stream."""
    body = talk.body(background=True, store=True, stream=True)
    stream = await talk.open_stream("POST", talk.path, body, most=1)
    if stream.answer.status != 200:
        stream.answer.accepted()
    if (response := stream.objects[0]["response"]).get("background") is not True:
        raise Lacking("the server ignores background")
    must((await _ended(talk, response))["status"] in ("completed", "incomplete"), "the response did not complete")
    again = await talk.open_stream("GET", _at(response, "?stream=true"))
    if again.answer.status == 200:
        must(again.objects[-1]["type"] in TERMINAL_TYPES, "the stream has no end")


@check("responses", area="lifecycle", source=RETRIEVE)
async def responses_cancel(talk: Talk) -> None:
    """Cancel ends a background response, and may come again."""
    response = await _begun(talk, input="Count from 1 to 500, and never stop talking.")
    first = await talk.send("POST", _at(response, "/cancel"))
    must(first.status != 200 or first.json.get("id") == response["id"], "the answer has another id")
    found = await _ended(talk, response)
    must(found["status"] in ("cancelled", "completed", "incomplete"), f"the status is {found['status']}")
    should(found["status"] == "cancelled", "the response ended before it was cancelled")
    first.accepted()
    again = await talk.send("POST", _at(response, "/cancel"))
    must(again.status == 200, f"the second cancel is refused, which has to return the response: {again.status}")
    must(again.json["status"] == "cancelled", f"the status is {again.json['status']} when it is cancelled again")


@check("responses", area="lifecycle", source=RETRIEVE)
async def responses_cancel_foreground(talk: Talk) -> None:
    """Cancel of a response that does not run in the background is a 400."""
    response = await _kept(talk)
    answer = await talk.send("POST", _at(response, "/cancel"))
    if answer.status in UNKNOWN:
        raise Lacking("the server cannot cancel")
    problem(answer, 400, 409)
