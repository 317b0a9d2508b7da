"""A world of responses: what may happen to them and to their server, and what must be so whatever happened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from pipeline.errors import RunInterrupted
from pipeline.protocol.events import DONE
from stages.harmony import HarmonyEncoding
from stages.persist.live import LiveResponse
from tests.support.databases import database
from tests.support.event_streams import final, read_sse, renumbered
from tests.support.faulty_database import Faulty
from tests.support.lifecycle_clients import STREAM, SYNC, Client, Mode, frames
from tests.support.paced_engine import Paced
from tests.support.response_lives import PATIENCE, cancelled, ended, until
from tests.support.scripts import script
from tests.support.server import Served, serving

TALK = "<|channel|>analysis<|message|>Let me count.<|end|><|start|>assistant<|channel|>final<|message|>1 2 3 4 5 6 7 8"

RUNNING = 2
"""How many background responses run at once: others wait."""

URL = "http://one.example"
"""Where each server in a row is found: the next one takes the one before for dead."""


@dataclass
class Life:
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
                client.seen = b"".join(frames(client.seen)[: max(0, self.kept - client.after - 1)])


@dataclass
class World:
    """One store, one server after the other, and all lives so far."""

    encoding: HarmonyEncoding
    store_at: str
    lives: list[Life] = field(default_factory=list)

    async def start(self) -> None:
        """A server comes up."""
        self._stack, self.engine = AsyncExitStack(), Paced(script(self.encoding, TALK))
        self.database = Faulty(database(self.store_at))
        server = serving(self.engine, self.encoding, self.database, url=URL, limit=RUNNING)
        self.served: Served[Paced] = await self._stack.enter_async_context(server)

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
        await until(lambda: client.answer or frames(client.seen) or (mode is SYNC and self._prompted(client)))
        response_id = self._prompted(client) if mode is SYNC else client.response_id
        self.lives.append(Life(response_id, [client], [task], is_kept=mode.background))

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
            status, answer = await cancelled(self.served, life.response_id)
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

    async def _check(self, life: Life) -> None:
        response = await ended(self.served, life.response_id)
        stream = await self.served.again(f"/v1/responses/{life.response_id}?stream=true")
        end = final(read_sse(stream))
        assert end.status == response["status"]
        assert end.status in life.may_be
        is_settled = end.error is not None and end.error.message == RunInterrupted().message
        last = len(frames(stream)) - 1
        for after in (last - 1, last, last + 1):
            client = Client(self.served, STREAM, after=after)
            await client.follow(life.response_id)
            life.clients.append(client)
        for client in life.clients:
            expected = behind(stream, client.after, is_settled=is_settled)
            assert expected.startswith(client.seen)
            assert not client.was_told or (client.seen or expected, client.answer or response) == (expected, response)
        body = {"input": "Next!", "conversation": life.clients[0].conversation}
        assert (await self.served.post(body))[0] == 200

    # Finding

    def _life(self, which: int) -> list[Life]:
        """The one of that number, if there is any."""
        lives = [life for life in self.lives if not life.is_gone]
        return lives[which % len(lives) :][:1] if lives else []

    def _running(self) -> Iterator[tuple[Life, LiveResponse]]:
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


def behind(stream: bytes, after: int, *, is_settled: bool) -> bytes:
    """What a reader gets of a stream behind that event: at least the end, where it may not have seen that."""
    whole = frames(stream)
    rest = whole[after + 1 :]
    if after + 1 > len(whole) or (is_settled and after + 1 == len(whole)):
        rest = [renumbered(whole[-1], after + 1)]
    return b"".join(rest) + DONE
