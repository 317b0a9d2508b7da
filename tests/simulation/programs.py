"""Clients whose functions programs call: each step of a program must be what its code and its outcomes decide."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from penstock.api.http.api_key import digest_of
from penstock.pipeline.protocol.items import fingerprint_of
from tests.simulation.clients import MODES, Client, Json
from tests.simulation.ledger import Known, Violation, response_of
from tests.simulation.program_watch import LOOK, METER, SCHEMA, KnownProgram
from tests.simulation.scripts import Script

if TYPE_CHECKING:
    from tests.simulation.world import World

WAYS = ("previous", "conversation", "unstored")
"""How a client goes on: by ``previous_response_id``, in a conversation, or with all items again."""

ATTEMPTS = 6
"""Attempts of a client to go on, of which servers may break all."""

PAUSES = (0.0, 0.1, 3.0, 30.0)
"""Seconds that a client takes for its calls: less or more than those for which a program keeps its process."""

MESSAGE: Json = {"type": "message", "role": "user", "content": "Run a program."}

TOOLS: Sequence[Json] = (
    {"type": "programmatic_tool_calling"},
    {"type": "function", "name": LOOK, "parameters": SCHEMA, "strict": False, "allowed_callers": ["programmatic"]},
    {"type": "mcp", "server_label": METER, "require_approval": "never", "allowed_callers": ["programmatic"]},
)


async def program(client: Client) -> None:
    """Have the model write a program, and answer its calls, perhaps in two ways at once."""
    code = json.dumps({"nonce": client.nonce(), "rounds": client.draw.randint(1, 4)})
    known = KnownProgram(client.owner, client.draw.choice(WAYS), code)
    client.world.ledger.programs.append(known)
    if known.way == "conversation":
        status, conversation = await client.insist("POST", "/v1/conversations", {})
        if status != 200:
            raise Violation(f"a conversation was answered with {status} {conversation}")
        known.conversation = conversation["id"]
    if not await _step(client, known, [MESSAGE]):
        return
    if client.draw.random() < 0.5:
        await _forge(client)
    if known.way != "conversation" and client.draw.random() < 0.3:
        other = deepcopy(known)
        client.world.ledger.programs.append(other)
        await asyncio.gather(*(_go_on(client, each, at_once=True) for each in (known, other)))
    else:
        await _go_on(client, known)


async def _go_on(client: Client, known: KnownProgram, *, at_once: bool = False) -> None:
    """Answer all rounds, and perhaps talk on, unless the client leaves, or gets no answer itself."""
    while known.waiting and client.draw.random() > 0.1:
        await asyncio.sleep(0.0 if at_once else client.draw.choice(PAUSES))
        at_once = False
        outputs = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"c{client.nonce()}"}
            for call in known.waiting
        ]
        client.draw.shuffle(outputs)
        if not await _step(client, known, outputs):
            return
    if known.has_ended and client.draw.random() < 0.5:
        await _step(client, known, [MESSAGE])


async def _step(client: Client, known: KnownProgram, given: list[Json]) -> bool:
    """Send a request until its response is completed; return False if that is not known."""
    modes = MODES[:2] if known.way == "unstored" else MODES
    for _ in range(1 if known.way == "conversation" else ATTEMPTS):
        mode = client.draw.choice(modes)
        client.world.ledger.attempts[known.nonce][len(known.outcomes)] += 1
        answer = _end_of(await client.create(_body(client, known, mode, given), mode))
        if answer and answer["status"] == "completed":
            known.take(given, answer)
            return True
    return False


def _body(client: Client, known: KnownProgram, mode: str, given: Sequence[Json]) -> Json:
    """Return the next request."""
    body = client.body(mode, input=[*given], tools=[*TOOLS])
    if not known.has_ended:
        body["metadata"] |= {"program": known.code}
    body["metadata"].pop("fault", None)
    match known.way:
        case "conversation":
            body |= {"conversation": known.conversation}
        case "unstored":
            body |= {"store": False, "input": [*known.history, *given]}
        case _ if known.previous:
            body |= {"previous_response_id": known.previous}
        case _:
            pass
    return body


def _end_of(known: Known | None) -> Json | None:
    """Return a response that has ended, as a client has got it."""
    if known is None:
        return None
    ends = (response_of(reading.frames[-1]) for reading in known.readings if reading.has_ended)
    return next(iter([*known.answers, *ends]), None)


async def _forge(client: Client) -> None:
    """Go on with a program of the client's own under the call id of another owner's, which waits."""
    others = [each for each in client.world.ledger.programs if each.owner != client.owner and each.waiting]
    if not others:
        return
    call_id = others[-1].call_id
    code = json.dumps({"nonce": client.nonce(), "rounds": 3})
    known = KnownProgram(client.owner, "unstored", code)
    begun = {"type": "program", "id": "prog_1", "call_id": call_id, "code": code, "fingerprint": fingerprint_of(code)}
    known.history = [MESSAGE, begun]
    known.begins(begun)
    for number, asked in enumerate(known.asked):
        call: Json = {"id": f"made_up_{number}", "name": asked.function, "arguments": json.dumps(asked.arguments)}
        call["caller"] = {"type": "program", "caller_id": call_id}
        if asked.function == LOOK:
            call |= {"type": "function_call", "call_id": f"call_{number}", "status": "completed"}
        else:
            call |= {"type": "mcp_call", "server_label": METER, "output": f"c{client.nonce()}", "error": None}
        known.calls(call)
        known.history.append(call)
    known.of_meter.clear()  # the client has made them up
    if known.waiting:
        client.world.ledger.programs.append(known)
        await _go_on(client, known, at_once=True)


def check_programs(world: World) -> None:
    """Check that each call of the meter is that of its program, and was made once unless a client has tried again."""
    measured, names = world.programs.measured, dict[str, str]()
    for known in world.ledger.programs:
        for name, result in known.of_meter.items():
            if names.setdefault(result, name) != name:
                raise Violation(f"{name} and {names[result]} have the same result {result}")
            call = measured.get(result)
            if call is None or (call.owner, call.nonce) != (digest_of(world.keys[known.owner]), known.nonce):
                raise Violation(f"{name} of {known} has the result {result}, which is that of {call}")
    for nonce, steps in world.ledger.attempts.items():
        made = Counter(call for call in measured.values() if call.nonce == nonce)
        if made and max(made.values()) > max(steps.values()) and not world.plan.resumes:
            raise Violation(f"calls were made {made} times, and the client has tried the steps {steps} times")


SCRIPTS: Mapping[str, Script] = {"program": program}
