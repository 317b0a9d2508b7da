"""The promises that hold at the end of a simulation: nothing accepted is lost, and nothing of a client is left."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.pipeline.errors import RunInterrupted
from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.protocol.events import ResponseEvent
from tests.simulation.accounts import check_accounts
from tests.simulation.batches import check_everywhere
from tests.simulation.clients import Client
from tests.simulation.engine import count_to
from tests.simulation.further_invariants import (
    check_file,
    check_hooks,
    check_parts_of_batches,
    check_parts_of_files,
    check_rate,
)
from tests.simulation.ledger import ENDED, Known, Reading, Violation, is_terminal, number_of, renumbered, response_of
from tests.simulation.programs import check_programs

if TYPE_CHECKING:
    from tests.simulation.servers import SimulatedServer
    from tests.simulation.world import World

Json = dict[str, Any]

_event = msgspec.json.Decoder[ResponseEvent](ResponseEvent)

LOOKS = 10
"""Looks at an idle server, of which one has to find that it holds nothing."""

_HELD = "select owner, kind, held from places where held > 0 and server_id in (select id from servers)"

_UNENDED = """
    select id, status from responses where ended_at is null union select id, 'not announced' from webhooks
    union select id, status from batches where ended_at is null
"""


def is_settled(world: World, *, explains: bool = False) -> Any:
    """Return True if all servers run, and the store has nothing that has not ended."""
    left = world.store.rows(_UNENDED)
    down = [server.host for server in world.servers if not server.is_up]
    return f"unended {left}, down {down}" if explains else not left and not down


async def check_end(world: World) -> None:
    """Check all that was accepted, at every server, and what else clients were promised."""
    client = Client(world, "checker", "alice")
    for known in world.ledger.responses.values():
        client.owner = known.owner
        async with client.session():
            await check_response(world, client, known)
    for conversation, owner in world.ledger.conversations.items():
        client.owner = owner
        async with client.session():
            await check_conversation(world, client, conversation)
    for file in world.ledger.files.values():
        client.owner = file.owner
        async with client.session():
            await check_file(world, client, file)
    for batch in world.ledger.batches.values():
        client.owner = batch.owner
        async with client.session():
            await check_everywhere(client, batch)
    check_hooks(world)
    check_rate(world)
    check_accounts(world)
    check_programs(world)
    if not world.plan.has("deaths"):  # a killed server withdraws nothing
        check_refused(world)
    for owner in world.keys:
        client.owner = owner
        async with client.session():
            await check_request(client)


def check_refused(world: World) -> None:
    """Check that no request that was refused has an answer."""
    for response_id, status, response in world.store.rows("select id, status, response from responses"):
        nonce = json.loads(response)["metadata"].get("nonce")
        if nonce in world.ledger.refused and status in ("completed", "incomplete"):
            raise Violation(f"{response_id} was refused, and is {status}")


async def check_request(client: Client, **fields: Any) -> None:
    """Check that a new request is answered: no lock and no slot is left."""
    body = {"input": "Count.", "metadata": {"last": "3", "seconds": "0"}, **fields}
    status, answer = await client.insist("POST", "/v1/responses", body)
    if status != 200 or _text(answer) != count_to(3):
        raise Violation(f"a request after the end was answered with {status} {answer}")


async def check_response(world: World, client: Client, known: Known) -> None:
    """Check that all servers and all readers of a response agree."""
    if not known.is_stored:
        return
    copies, logs = [], []
    for server in world.servers:
        client.url = lambda path, url=server.url: url + path  # type: ignore[method-assign, misc]
        status, answer = await client.insist("GET", f"/v1/responses/{known.id}")
        if known.deleted and status != 404:
            raise Violation(f"{known.id} was deleted, and is answered with {status}")
        if status == 404:
            client.missing(known)
            return
        copies.append(answer)
        reading = Reading(-1)
        async with client.http.get(f"{server.url}/v1/responses/{known.id}?stream=true") as stream:
            reading.feed(await stream.read())
        if not reading.is_whole:
            raise Violation(f"the stream of {known.id}, which has ended, is not whole")
        logs.append(reading.frames)
    if any(copy != copies[0] for copy in copies) or any(log != logs[0] for log in logs):
        raise Violation(f"servers disagree on {known.id}: {copies}")
    check_copies(world, known, copies[0], logs[0])


def check_copies(world: World, known: Known, answer: Json, log: list[bytes]) -> None:
    """Check what clients have got of a response against what is stored."""
    check_log(known, answer, log)
    check_outcome(world, known, answer)
    error = answer["error"]
    is_interrupted = error is not None and error["message"] == RunInterrupted().message
    is_again = world.may_run_again(known)
    may_differ = (is_interrupted or is_again) and world.plan.has("disk", "pauses")  # its end was never stored
    for copy in known.answers:
        if copy != answer and not may_differ:
            raise Violation(f"a client got {copy}, and the store has {answer}")
    for reading in known.readings:
        if is_again:
            check_last_run(known, reading, log, may_differ=may_differ)
            continue
        check_reading(known, reading, log, is_interrupted=is_interrupted, may_differ=may_differ)


def check_log(known: Known, answer: Json, log: list[bytes]) -> None:
    """Check that the stored stream obeys all rules, and ends with the response."""
    checker = StreamChecker()
    for frame in log:
        checker.feed(_event.decode(frame.partition(b"data: ")[2]))
    checker.finish()
    if response_of(log[-1]) != answer:
        raise Violation(f"the stream of {known.id} ends with {log[-1]!r}, and the response is {answer}")


def check_reading(known: Known, reading: Reading, log: list[bytes], *, is_interrupted: bool, may_differ: bool) -> None:
    """Check that a reader got the events of the log; those that a killed server did not store may differ."""
    if reading.is_whole and not reading.frames and reading.after != len(log) - 1:
        raise Violation(f"a reader after {reading.after} got nothing of {len(log)} events")
    last = reading.frames[-1] if reading.frames else b""
    if last and is_terminal(last) and number_of(last) <= reading.after:
        expected = reading.after + 1 if is_interrupted else len(log) - 1
        if number_of(last) != expected:
            raise Violation(f"a reader after {reading.after} got {last!r}, and not event {expected}")
    for frame in reading.frames:
        number = number_of(frame)
        if number < len(log) and log[number] == frame:
            continue
        is_end = not is_terminal(frame) or may_differ or frame == renumbered(log[-1], number)
        if is_interrupted and number >= stored_before_end(log) and is_end:
            continue
        raise Violation(f"a reader of {known.id} got {frame!r}, and the log has {log[number : number + 1]}")


def check_last_run(known: Known, reading: Reading, log: list[bytes], *, may_differ: bool) -> None:
    """Check that a reader from the start got all events of one run, if it got the end: of the last one."""
    if reading.has_ended and reading.frames != log and not may_differ:
        pairs = zip(reading.frames, log, strict=False)
        got, has = next((pair for pair in pairs if pair[0] != pair[1]), (reading.frames[-1], log[-1]))
        raise Violation(f"a reader of {known.id} got {got!r}, and its last run has {has!r}")


def stored_before_end(log: list[bytes]) -> int:
    """Return the number of the first event that may have been derived at the end of an interrupted response."""
    number = len(log) - 1
    while number and b".done\n" in log[number - 1][:60]:
        number -= 1
    return number


def check_outcome(world: World, known: Known, answer: Json) -> None:
    """Check that a response has the text of the engine, and no other end than its faults explain."""
    status, text = answer["status"], _text(answer)
    waits = any(item["type"] == "function_call" for item in answer["output"])  # of a program
    whole = "" if waits else count_to(int(known.wanted["last"]))
    if status not in ENDED:
        raise Violation(f"{known.id} is {status} after the end")
    if status == "completed":
        if text != whole or known.wanted.get("fault") == "break":
            raise Violation(f"{known.id} has the text {text!r} in place of {whole!r}")
    elif not whole.startswith(text):
        raise Violation(f"{known.id} has the text {text!r}, which is no beginning of {whole!r}")
    elif status == "cancelled" and not known.cancelled and not world.plan.has("network", "deaths"):
        raise Violation(f"{known.id} was cancelled by no client")
    elif status == "failed" and world.may_run_again(known) and answer["error"]["message"] == RunInterrupted().message:
        raise Violation(f"{known.id} was interrupted, and has not run again")
    elif status == "failed" and not known.wanted.get("fault") and not world.plan.has("deaths", "pauses"):
        raise Violation(f"{known.id} has failed without a reason: {answer['error']}")


async def check_conversation(world: World, client: Client, conversation: str) -> None:
    """Check that a conversation has the items of each of its responses that is completed or incomplete, once."""
    status, page = await client.insist("GET", f"/v1/conversations/{conversation}/items?order=asc&limit=100")
    if status != 200:
        raise Violation(f"the conversation {conversation} is answered with {status}")
    texts = Counter(
        _item_text(item) for item in page["data"] if item["type"] == "message" and item["role"] == "assistant"
    )
    sql = f"select status, response from responses where conversation_id = '{conversation}'"
    stored = [
        json.loads(response) for status, response in world.store.rows(sql) if status in ("completed", "incomplete")
    ]
    expected = Counter(_text(response) for response in stored if response["output"])
    missing = expected - texts
    if missing:
        raise Violation(f"the conversation {conversation} lacks {missing}")
    await check_request(client, conversation=conversation)


async def check_idle(world: World) -> None:
    """Check that servers without clients hold nothing of them, in memory or in the store."""
    check_parts_of_files(world)
    check_parts_of_batches(world)
    if held := world.store.rows(_HELD):
        raise Violation(f"slots are still reserved in the store: {held}")
    for server in world.servers:
        left: dict[str, Any] = {}
        for _ in range(LOOKS):
            if not (left := {name: value for name, value in _held(server).items() if value}):
                break
            await asyncio.sleep(0.1)  # it may have been the change of a heartbeat
        else:
            raise Violation(f"{server.host} still holds {left}")


def _held(server: SimulatedServer) -> dict[str, Any]:
    assert server.running
    assert server.runner
    scheduler = server.running.scheduler
    slots = {
        key: (each.used, each.reserved)
        for key, each in scheduler.admission._slots.items()
        if each.used or each.reserved
    }
    return {
        "runs": len(scheduler.runs),
        "requests": scheduler.in_flight.count,
        "interrupts": len(scheduler._interrupts),
        "background tasks": len(scheduler.background._tasks),
        "background slots": scheduler.background.slots.in_use,
        "waiting pipelines": len(scheduler.background.opening),
        "slots of keys": slots,
        "queueing turns": dict(scheduler.admission._queueing),
        "programs": server.programs.running(server.process),
        "generations": sum(engine.running for engine in server.engines),
        "changes of the store": scheduler.store.backlog,
        "bytes of bodies": server.running.api.held.count,
        "connections": server.runner.counts.open,
        "tasks": server.tasks() - server.idle_tasks,
    }


def _text(response: Json) -> str:
    return "".join(map(_item_text, (item for item in response["output"] if item["type"] == "message")))


def _item_text(item: Json) -> str:
    return "".join(part["text"] for part in item["content"] if part["type"] == "output_text")
