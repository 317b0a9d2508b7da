"""Responses through starts, stops and kills of their server, with the rules that hold afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from pipeline.errors import EngineFailed, RunInterrupted
from pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk
from pipeline.protocol.events import DONE
from pipeline.protocol.response import Response
from stages.generate.scripted import Script, ScriptedEngine
from stages.harmony import HarmonyEncoding
from stages.persist.live import LiveResponse
from tests.support.api_clients import (
    PATIENCE,
    STREAM,
    SYNC,
    Client,
    Mode,
    cancel_response,
    get_response,
    sse_frames,
    wait_for_end,
    wait_until,
)
from tests.support.event_streams import final, read_sse, renumbered
from tests.support.server import ApiClient, Server, running_server, script
from tests.support.stores import FaultyDatabase, database_at


@dataclass
class PacedEngine(ScriptedEngine):
    """Plays its script to those that run by so many tokens as `say` lets it."""

    is_free: bool = False
    """Whether it says everything by itself."""
    allowed: dict[str, int] = field(default_factory=dict)
    """How many tokens it may say, by the response's id."""

    def say(self, count: int) -> None:
        """Let everything that runs go on by so many tokens."""
        for run in self._runs:
            self.allowed[run.response_id] = self.allowed.get(run.response_id, 0) + count
            run.woken.set()

    def say_all(self) -> None:
        """Let everything come to its end, also what begins later."""
        self.is_free = True
        self.say(0)

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        for number, token in enumerate(self.script.token_ids):
            while number >= self._limit(run) and not (run.is_cancelled or self.is_stopping):
                run.woken.clear()
                await run.woken.wait()
            if run.is_cancelled:
                yield GenerationFinished("cancelled", cached_tokens=0, duration=0.0)
                return
            if self.is_stopping:
                raise EngineFailed("The server is stopping.")
            yield TokenChunk((token,))
        run.is_finished = True
        yield GenerationFinished("stop", cached_tokens=0, duration=0.0)

    def _limit(self, run: Any) -> float:
        return inf if self.is_free else self.allowed.get(run.response_id, 0)


COUNTING = (
    "<|channel|>analysis<|message|>Let me count.<|end|><|start|>assistant<|channel|>final<|message|>1 2 3 4 5 6 7 8"
)

MAX_RUNNING = 2
"""How many background responses run at once: others wait."""

URL = "http://one.example"
"""Where each server in a row is found: the next one takes the one before for dead."""


@dataclass
class TrackedResponse:
    """A response, and all who wait for it or read it; the first is the one who asked for it."""

    response_id: str
    clients: list[Client]
    tasks: list[asyncio.Task[None]]
    may_be: set[str] = field(default_factory=lambda: {"completed"})
    """How it may have ended, for what has happened to it."""
    kept: int = 0
    """How many of its events are in the store for sure."""
    is_kept: bool = False
    """Whether it is there for sure."""
    is_gone: bool = False

    @property
    def in_front(self) -> bool:
        """Whether it is made in front of its client."""
        return not self.clients[0].mode.background

    def join(self, client: Client) -> None:
        """Somebody else reads it."""
        self.clients.append(client)
        self.tasks.append(asyncio.create_task(client.follow(self.response_id)))

    def forget(self) -> None:
        """A server was killed in the middle of it: what was not kept is as if nobody had ever seen it."""
        self.may_be.add("failed")
        for client in self.clients:
            if not client.was_told:
                client.seen = b"".join(sse_frames(client.seen)[: max(0, self.kept - client.after - 1)])


@dataclass
class World:
    """One store, one server after the other, and all lives so far."""

    encoding: HarmonyEncoding
    store_at: str
    lives: list[TrackedResponse] = field(default_factory=list)

    async def start(self) -> None:
        """A server comes up."""
        self._stack, self.engine = AsyncExitStack(), PacedEngine(script(self.encoding, COUNTING))
        self.database = FaultyDatabase(database_at(self.store_at))
        server = running_server(self.engine, self.encoding, self.database, url=URL, limit=MAX_RUNNING)
        self.served: Server[PacedEngine] = await self._stack.enter_async_context(server)

    async def close(self) -> None:
        """All leave, and the server ends."""
        tasks = [task for life in self.lives for task in life.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    # What may happen

    async def ask(self, mode: Mode) -> None:
        """Somebody asks for a response."""
        client = Client(self.served, mode)
        task = asyncio.create_task(client.ask())
        await wait_until(lambda: client.answer or sse_frames(client.seen) or (mode is SYNC and self._prompted(client)))
        response_id = self._prompted(client) if mode is SYNC else client.response_id
        self.lives.append(TrackedResponse(response_id, [client], [task], is_kept=mode.background))

    async def say(self, count: int) -> None:
        """The engine goes on."""
        self.engine.say(count)
        await asyncio.sleep(0.01)

    async def follow(self, which: int, after: int) -> None:
        """Somebody else reads a response as well."""
        for life in self._life(which):
            life.join(Client(self.served, STREAM, after=after))

    async def leave(self, which: int) -> None:
        """Whoever was there first leaves."""
        for life in self._life(which):
            for number, task in enumerate(life.tasks):
                if task.cancel():
                    life.may_be |= {"cancelled"} if life.in_front and number == 0 else set()
                    return

    async def cancel(self, which: int) -> None:
        """Somebody cancels a response."""
        for life in self._life(which):
            status, answer = await cancel_response(self.served, life.response_id)
            assert (status, life.in_front) == (400, True) or answer["status"] in {*life.may_be, "cancelled"}
            life.may_be |= {"cancelled"} if status == 200 else set()

    async def delete(self, which: int) -> None:
        """Somebody deletes a response."""
        for life in self._life(which):
            assert (await self.served.delete(f"/v1/responses/{life.response_id}"))[0] == 200
            life.is_gone = True

    async def save(self) -> None:
        """Time passes, in which all is written that is on its way."""
        running = [(life, run, run._log.last_number + 1) for life, run in self._running()]
        for _, run, _ in running:
            if run.response.status != "queued":  # the log of what waits is written by the server that makes it
                run._flush()
        await self.served.store._writer.settled()
        for life, _, said in running:
            life.is_kept, life.kept = True, said

    async def stop(self) -> None:
        """The server stops in good order, and another one comes up."""
        for life, _ in self._running():
            life.may_be.add("failed")
        await self.served.runs.drain(0)
        in_front = [life.tasks[0] for life in self.lives if life.in_front]
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*in_front, return_exceptions=True)
        await self._end()

    async def kill(self) -> None:
        """The server is gone from one moment to the next, and another one comes up."""
        self.database.is_down = True
        for life, _ in self._running():
            life.forget()
        for task in self.served.runs.background._tasks.values():
            task.cancel()
        await self._end()
        for life in self.lives:
            if not life.is_gone and not life.is_kept:
                life.is_gone = (await self.served.get(f"/v1/responses/{life.response_id}"))[0] == 404

    async def _end(self) -> None:
        await self.close()
        await self.start()

    # What must be so

    async def check(self) -> None:
        """Everything comes to its end, once, and everybody agrees about it."""
        self.engine.say_all()
        async with asyncio.timeout(PATIENCE):
            while self._is_busy or not all(task.done() for life in self.lives for task in life.tasks):
                await asyncio.sleep(0.005)
        for life in self.lives:
            tasks = (task for task in life.tasks if not task.cancelled())
            await asyncio.gather(*tasks, return_exceptions=life.is_gone)  # who polls what is gone meets a 404
            if life.is_gone:
                assert (await self.served.get(f"/v1/responses/{life.response_id}"))[0] == 404
            else:
                await self._check(life)

    @property
    def _is_busy(self) -> bool:
        """Whether anything is still at a response."""
        runs = self.served.runs
        return bool(len(runs.live) or runs.admission.running or self.engine.running)

    async def _check(self, life: TrackedResponse) -> None:
        response = await wait_for_end(self.served, life.response_id)
        stream = await self.served.again(f"/v1/responses/{life.response_id}?stream=true")
        end = final(read_sse(stream))
        assert end.status == response["status"]
        assert end.status in life.may_be
        is_settled = end.error is not None and end.error.message == RunInterrupted().message
        last = len(sse_frames(stream)) - 1
        for after in (last - 1, last, last + 1):
            client = Client(self.served, STREAM, after=after)
            await client.follow(life.response_id)
            life.clients.append(client)
        for client in life.clients:
            expected = events_after(stream, client.after, is_settled=is_settled)
            assert expected.startswith(client.seen)
            assert not client.was_told or (client.seen or expected, client.answer or response) == (expected, response)
        body = {"input": "Next!", "conversation": life.clients[0].conversation}
        assert (await self.served.post(body))[0] == 200

    # Finding

    def _life(self, which: int) -> list[TrackedResponse]:
        """The one of that number, if there is any."""
        lives = [life for life in self.lives if not life.is_gone]
        return lives[which % len(lives) :][:1] if lives else []

    def _running(self) -> Iterator[tuple[TrackedResponse, LiveResponse]]:
        """What has not ended, or not in the store."""
        runs = {run.response.id: run for run in self.served.runs.live}
        return ((life, runs[life.response_id]) for life in self.lives if life.response_id in runs)

    def _prompted(self, client: Client) -> str:
        """The id of the response that the engine was asked for by a client, if it was."""
        for prompt in self.engine.prompts:
            conversation = prompt.response.conversation
            if conversation and conversation.id == client.conversation:
                return prompt.response.id
        return ""


def events_after(stream: bytes, after: int, *, is_settled: bool) -> bytes:
    """What a reader gets of a stream behind that event: at least the end, where it may not have seen that."""
    whole = sse_frames(stream)
    rest = whole[after + 1 :]
    if after + 1 > len(whole) or (is_settled and after + 1 == len(whole)):
        rest = [renumbered(whole[-1], after + 1)]
    return b"".join(rest) + DONE


READ_TIMEOUT = 120.0
"""Seconds in which the stream of a response that is over has been read, on a machine that is busy."""

CONTINUABLE = ("completed", "incomplete")
"""The statuses of what can be continued."""

OUTCOMES = {
    "completed": (None, None),
    "incomplete": (None, {"reason": "max_output_tokens"}),
    "failed": ("server_error", None),
    "cancelled": (None, None),
}
"""By status: the code of the error, and the details of what is incomplete."""


@dataclass
class FinishedResponse:
    """One response as a server tells of it afterwards: the one that made it, or the one that came next."""

    server: ApiClient
    response_id: str
    response: dict[str, Any]
    stream: bytes

    @classmethod
    async def of(cls, server: ApiClient, response_id: str) -> FinishedResponse:
        """Look at a response, once it is over."""
        response = await wait_for_end(server, response_id)
        async with asyncio.timeout(READ_TIMEOUT):
            stream = await server.again(f"/v1/responses/{response_id}?stream=true")
        return cls(server, response_id, response, stream)

    @property
    def text(self) -> str:
        """What its message says."""
        return "".join(
            part["text"] for item in self.response["output"] if item["type"] == "message" for part in item["content"]
        )

    @property
    def is_settled(self) -> bool:
        """Whether its server was killed, and another one has ended it: its client may have seen more."""
        error = self.response["error"]
        return error is not None and error["message"] == RunInterrupted().message

    async def check(self, status: str, client: Client) -> None:
        """It has that status in every respect, whoever asks and however often, and holds on to nothing."""
        self._check_outcome(status)
        self._check_told(client)
        await self._check_every_number()
        await self._check_cancelling()
        await self._check_going_on()
        await self._check_conversation(client.conversation)
        assert await get_response(self.server, self.response_id) == self.response

    def _check_outcome(self, status: str) -> None:
        """Status, error and details fit, what is whole says so, and the stream ends with just this response."""
        response = self.response
        error = response["error"] and response["error"]["code"]
        assert (response["status"], error, response["incomplete_details"]) == (status, *OUTCOMES[status])
        assert (response["completed_at"] is not None) is (status == "completed")
        *before, last = [item["status"] for item in response["output"]]
        assert before == ["completed"] * len(before)
        assert last == ("completed" if status == "completed" else "incomplete")
        assert final(read_sse(self.stream)) == msgspec.convert(response, Response)

    def _check_told(self, client: Client) -> None:
        """What the client saw is what everybody sees later, to the byte, as far as it came."""
        if client.mode.stream:
            assert self.stream.startswith(b"".join(sse_frames(client.seen)))
            assert not client.was_told or client.seen == self.stream
        elif client.was_told:
            assert client.answer == self.response

    async def _check_every_number(self) -> None:
        """Behind each event comes the rest, at once; behind what never was, and what may never have been, the end."""
        whole = sse_frames(self.stream)
        last = len(whole) - 1
        for number in {0, 1, last // 3, last // 2, last - 1}:
            assert await self.behind(number) == b"".join(whole[number + 1 :]) + DONE
        assert await self.behind(last) == (renumbered(whole[-1], last + 1) if self.is_settled else b"") + DONE
        assert await self.behind(last + 1000) == renumbered(whole[-1], last + 1001) + DONE

    async def behind(self, number: int) -> bytes:
        """Its stream behind the event of that number."""
        async with asyncio.timeout(READ_TIMEOUT):
            return await self.server.again(f"/v1/responses/{self.response_id}?stream=true&starting_after={number}")

    async def _check_cancelling(self) -> None:
        """To cancel it, as often as one likes, changes nothing; a foreground one that ended by itself is a 400."""
        is_idle = self.response["background"] or self.response["status"] == "cancelled"
        for _ in range(2):
            status, answer = await cancel_response(self.server, self.response_id)
            assert (status, answer) == (200, self.response) if is_idle else status == 400

    async def _check_going_on(self) -> None:
        """It is continued if it came to an end of its own; if not, that is a 400 which says so."""
        body = {"input": "Go on.", "previous_response_id": self.response_id}
        status, answer = await self.server.post(body)
        if self.response["status"] in CONTINUABLE:
            assert (status, answer["status"]) == (200, "completed")
        else:
            assert (status, answer["error"]["code"]) == (400, "previous_response_unfinished")

    async def _check_conversation(self, conversation_id: str) -> None:
        """Its conversation has all of it or nothing, and takes the next response at once."""
        path = f"/v1/conversations/{conversation_id}/items?order=asc"
        _, items = await self.server.get(path)
        added = ["message", *(item["type"] for item in self.response["output"])]
        assert [item["type"] for item in items["data"]] == (added if self.response["status"] in CONTINUABLE else [])
        status, answer = await self.server.post({"input": "Next!", "conversation": conversation_id})
        assert (status, answer["status"]) == (200, "completed")
