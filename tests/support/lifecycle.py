"""Responses through starts, stops and kills of their server, with the rules that hold afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.pipeline.errors import RunInterrupted
from penstock.pipeline.protocol.events import DONE
from penstock.pipeline.protocol.response import Response
from penstock.services.runs.run import Run
from tests.support import api_clients
from tests.support.api_clients import ApiClient
from tests.support.event_streams import final, read_sse, renumbered
from tests.support.server import PacedEngine, Server, running_server, script
from tests.support.stores import FaultyDatabase, database_at

COUNTING = (
    "<|channel|>analysis<|message|>Let me count.<|end|><|start|>assistant<|channel|>final<|message|>1 2 3 4 5 6 7 8"
)

MAX_RUNNING = 2
"""Background responses that run at once; others are queued."""

URL = "http://one.example"
"""The URL of every server in turn: each server declares its predecessor at the same URL dead."""


@dataclass
class TrackedResponse:
    """A response and its clients; the first client created it."""

    response_id: str
    clients: list[api_clients.Client]
    tasks: list[asyncio.Task[None]]
    may_be: set[str] = field(default_factory=lambda: {"completed"})
    """Statuses that the response may end with, after all that has happened so far."""
    kept: int = 0
    """Number of events that are known to be in the store."""
    is_kept: bool = False
    """True if the response is known to be in the store."""
    is_gone: bool = False

    @property
    def in_front(self) -> bool:
        return not self.clients[0].mode.background

    def join(self, client: api_clients.Client) -> None:
        self.clients.append(client)
        self.tasks.append(asyncio.create_task(client.follow(self.response_id)))

    def forget(self) -> None:
        """Drop the received events that a killed server did not store."""
        self.may_be.add("failed")
        for client in self.clients:
            if not client.is_complete:
                client.seen = b"".join(api_clients.sse_frames(client.seen)[: max(0, self.kept - client.after - 1)])


@dataclass
class World:
    """One store, its servers one after another, and all responses so far."""

    store_at: str
    responses: list[TrackedResponse] = field(default_factory=list)

    async def start(self) -> None:
        self._stack, self.engine = AsyncExitStack(), PacedEngine(script(COUNTING), initial=0)
        self.database = FaultyDatabase(database_at(self.store_at))
        server = running_server(self.engine, self.database, url=URL, limit=MAX_RUNNING)
        self.served: Server[PacedEngine] = await self._stack.enter_async_context(server)

    async def close(self) -> None:
        tasks = [task for tracked in self.responses for task in tracked.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    # Actions

    async def ask(self, mode: api_clients.Mode) -> None:
        client = api_clients.Client(self.served, mode)
        task = asyncio.create_task(client.ask())
        await api_clients.wait_until(
            lambda: (
                client.answer
                or api_clients.sse_frames(client.seen)
                or (mode is api_clients.SYNC and self._prompted(client))
            )
        )
        response_id = self._prompted(client) if mode is api_clients.SYNC else client.response_id
        self.responses.append(TrackedResponse(response_id, [client], [task], is_kept=mode.background))

    async def say(self, count: int) -> None:
        """Let the engine generate ``count`` tokens."""
        self.engine.say(count)
        await asyncio.sleep(0.01)

    async def follow(self, which: int, after: int) -> None:
        for tracked in self._chosen(which):
            tracked.join(api_clients.Client(self.served, api_clients.STREAM, after=after))

    async def leave(self, which: int) -> None:
        for tracked in self._chosen(which):
            for number, task in enumerate(tracked.tasks):
                if task.cancel():
                    tracked.may_be |= {"cancelled"} if tracked.in_front and number == 0 else set()
                    return

    async def cancel(self, which: int) -> None:
        for tracked in self._chosen(which):
            status, answer = await self.served.cancel(tracked.response_id)
            assert (status, tracked.in_front) == (400, True) or answer["status"] in {*tracked.may_be, "cancelled"}
            tracked.may_be |= {"cancelled"} if status == 200 else set()

    async def delete(self, which: int) -> None:
        for tracked in self._chosen(which):
            assert (await self.served.delete(f"/v1/responses/{tracked.response_id}"))[0] == 200
            tracked.is_gone = True

    async def save(self) -> None:
        """Flush all logs and wait until the store has written them."""
        running = [(tracked, run, run.log.last_number + 1) for tracked, run in self._running()]
        for _, run, _ in running:
            if run.response.status != "queued":  # the server that runs a queued response writes its log
                run._flush()
        await self.served.store.writer.flushed()
        for tracked, _, kept in running:
            tracked.is_kept, tracked.kept = True, kept

    async def stop(self) -> None:
        for tracked, _ in self._running():
            tracked.may_be.add("failed")
        await self.served.scheduler.drain(0)
        in_front = [tracked.tasks[0] for tracked in self.responses if tracked.in_front]
        async with asyncio.timeout(api_clients.PATIENCE):
            await asyncio.gather(*in_front, return_exceptions=True)
        await self._end()

    async def kill(self) -> None:
        self.database.is_down = True
        for tracked, _ in self._running():
            tracked.forget()
        for task in self.served.scheduler.background._tasks.values():
            task.cancel()
        await self._end()
        for tracked in self.responses:
            if not tracked.is_gone and not tracked.is_kept:
                tracked.is_gone = (await self.served.get(f"/v1/responses/{tracked.response_id}"))[0] == 404

    async def _end(self) -> None:
        await self.close()
        await self.start()

    # Checks

    async def check(self) -> None:
        """Let everything end, and check that all clients and the store agree on each response."""
        self.engine.say_all()
        async with asyncio.timeout(api_clients.PATIENCE):
            while self._is_busy or not all(task.done() for tracked in self.responses for task in tracked.tasks):
                await asyncio.sleep(0.005)
        for tracked in self.responses:
            tasks = (task for task in tracked.tasks if not task.cancelled())
            await asyncio.gather(*tasks, return_exceptions=tracked.is_gone)  # polling a deleted response is a 404
            if tracked.is_gone:
                assert (await self.served.get(f"/v1/responses/{tracked.response_id}"))[0] == 404
            else:
                await self._check(tracked)

    @property
    def _is_busy(self) -> bool:
        scheduler = self.served.scheduler
        return bool(len(scheduler.runs) or scheduler.in_flight.count or self.engine.running)

    async def _check(self, tracked: TrackedResponse) -> None:
        response = await self.served.wait_for_end(tracked.response_id)
        stream = await self.served.replay(tracked.response_id)
        end = final(read_sse(stream))
        assert end.status == response["status"]
        assert end.status in tracked.may_be
        is_settled = end.error is not None and end.error.message == RunInterrupted().message
        last = len(api_clients.sse_frames(stream)) - 1
        for after in (last - 1, last, last + 1):
            client = api_clients.Client(self.served, api_clients.STREAM, after=after)
            await client.follow(tracked.response_id)
            tracked.clients.append(client)
        for client in tracked.clients:
            expected = events_after(stream, client.after, is_settled=is_settled)
            assert expected.startswith(client.seen)
            assert not client.is_complete or (client.seen or expected, client.answer or response) == (
                expected,
                response,
            )
        body = {"input": "Next!", "conversation": tracked.clients[0].conversation}
        assert (await self.served.post(body))[0] == 200

    # Look-ups

    def _chosen(self, which: int) -> list[TrackedResponse]:
        responses = [tracked for tracked in self.responses if not tracked.is_gone]
        return responses[which % len(responses) :][:1] if responses else []

    def _running(self) -> Iterator[tuple[TrackedResponse, Run]]:
        """Return each response that has not ended, or not yet in the store, with its run."""
        runs = {run.response.id: run for run in self.served.scheduler.runs}
        return ((tracked, runs[tracked.response_id]) for tracked in self.responses if tracked.response_id in runs)

    def _prompted(self, client: api_clients.Client) -> str:
        """Return the response id of the prompt that a client caused, or an empty string."""
        for prompt in self.engine.prompts:
            conversation = prompt.facts.response.conversation
            if conversation and conversation.id == client.conversation:
                return prompt.facts.response.id
        return ""


def events_after(stream: bytes, after: int, *, is_settled: bool) -> bytes:
    """Return the stream after one event, and at least the last event if the reader may have missed it."""
    whole = api_clients.sse_frames(stream)
    rest = whole[after + 1 :]
    if is_settled and not rest:
        rest = [renumbered(whole[-1], after + 1)]
    elif after + 1 > len(whole):
        rest = whole[-1:]
    return b"".join(rest) + DONE


READ_TIMEOUT = 120.0
"""Seconds after which reading a finished stream has failed."""

CONTINUABLE = ("completed", "incomplete")
"""Statuses of responses that can be continued."""

OUTCOMES = {
    "completed": (None, None),
    "incomplete": (None, {"reason": "max_output_tokens"}),
    "failed": ("server_error", None),
    "cancelled": (None, None),
}
"""Error code and incomplete details by status."""


@dataclass
class FinishedResponse:
    """A finished response, as the server that made it or a later one returns it."""

    server: ApiClient
    response_id: str
    response: dict[str, Any]
    stream: bytes

    @classmethod
    async def of(cls, server: ApiClient, response_id: str) -> FinishedResponse:
        response = await server.wait_for_end(response_id)
        async with asyncio.timeout(READ_TIMEOUT):
            stream = await server.replay(response_id)
        return cls(server, response_id, response, stream)

    @property
    def text(self) -> str:
        return "".join(
            part["text"] for item in self.response["output"] if item["type"] == "message" for part in item["content"]
        )

    @property
    def is_settled(self) -> bool:
        """True if another server ended it after a kill; its client may have received more events."""
        error = self.response["error"]
        return error is not None and error["message"] == RunInterrupted().message

    async def check(self, status: str, client: api_clients.Client) -> None:
        """Check that every request agrees on the status, and that the response leaves no lock."""
        self._check_outcome(status)
        self._check_received(client)
        await self._check_every_number()
        await self._check_cancelling()
        await self._check_going_on()
        await self._check_conversation(client.conversation)
        assert await self.server.get_response(self.response_id) == self.response

    def _check_outcome(self, status: str) -> None:
        """Check that status, error, details and items fit, and that the stream ends with this response."""
        response = self.response
        error = response["error"] and response["error"]["code"]
        assert (response["status"], error, response["incomplete_details"]) == (status, *OUTCOMES[status])
        assert (response["completed_at"] is not None) is (status == "completed")
        *before, last = [item["status"] for item in response["output"]]
        assert before == ["completed"] * len(before)
        assert last == ("completed" if status == "completed" else "incomplete")
        assert final(read_sse(self.stream)) == msgspec.convert(response, Response)

    def _check_received(self, client: api_clients.Client) -> None:
        """Check that the client received the same bytes as later readers."""
        if client.mode.stream:
            assert self.stream.startswith(b"".join(api_clients.sse_frames(client.seen)))
            assert not client.is_complete or client.seen == self.stream
        elif client.is_complete:
            assert client.answer == self.response

    async def _check_every_number(self) -> None:
        """Check that each ``starting_after`` returns the later events, and a number past the end the last event."""
        last = len(api_clients.sse_frames(self.stream)) - 1
        for number in {0, 1, last // 3, last // 2, last - 1, last, last + 1000}:
            assert await self.after(number) == events_after(self.stream, number, is_settled=self.is_settled)

    async def after(self, number: int) -> bytes:
        async with asyncio.timeout(READ_TIMEOUT):
            return await self.server.replay(self.response_id, f"&starting_after={number}")

    async def _check_cancelling(self) -> None:
        """Check that cancelling changes nothing, and is a 400 for a foreground response that was not cancelled."""
        is_idle = self.response["background"] or self.response["status"] == "cancelled"
        for _ in range(2):
            status, answer = await self.server.cancel(self.response_id)
            assert (status, answer) == (200, self.response) if is_idle else status == 400

    async def _check_going_on(self) -> None:
        """Check that it can be continued if it is completed or incomplete, and that this is a 400 otherwise."""
        body = {"input": "Go on.", "previous_response_id": self.response_id}
        status, answer = await self.server.post(body)
        if self.response["status"] in CONTINUABLE:
            assert (status, answer["status"]) == (200, "completed")
        else:
            assert (status, answer["error"]["code"]) == (400, "previous_response_unfinished")

    async def _check_conversation(self, conversation_id: str) -> None:
        """Check that its conversation has all of its items or none, and accepts the next response at once."""
        path = f"/v1/conversations/{conversation_id}/items?order=asc"
        _, items = await self.server.get(path)
        added = ["message", *(item["type"] for item in self.response["output"])]
        assert [item["type"] for item in items["data"]] == (added if self.response["status"] in CONTINUABLE else [])
        status, answer = await self.server.post({"input": "Next!", "conversation": conversation_id})
        assert (status, answer["status"]) == (200, "completed")
