"""What is left of a response that is over: the same for whoever asks, and nothing that hangs on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.errors import RunInterrupted
from pipeline.protocol.events import DONE
from pipeline.protocol.response import Response
from tests.support.event_streams import final, read_sse, renumbered
from tests.support.lifecycle_clients import Client, frames
from tests.support.response_lives import cancelled, ended, found
from tests.support.server import Asked

AT_ONCE = 120.0
"""Seconds in which the stream of a response that is over has been read, on a machine that is busy."""

CONTINUED = ("completed", "incomplete")
"""The statuses of what can be continued."""

OUTCOMES = {
    "completed": (None, None),
    "incomplete": (None, {"reason": "max_output_tokens"}),
    "failed": ("server_error", None),
    "cancelled": (None, None),
}
"""By status: the code of the error, and the details of what is incomplete."""


@dataclass
class Aftermath:
    """One response as a server tells of it afterwards: the one that made it, or the one that came next."""

    server: Asked
    response_id: str
    response: dict[str, Any]
    stream: bytes

    @classmethod
    async def of(cls, server: Asked, response_id: str) -> Aftermath:
        """Look at a response, once it is over."""
        response = await ended(server, response_id)
        async with asyncio.timeout(AT_ONCE):
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
        assert await found(self.server, self.response_id) == self.response

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
            assert self.stream.startswith(b"".join(frames(client.seen)))
            assert not client.was_told or client.seen == self.stream
        elif client.was_told:
            assert client.answer == self.response

    async def _check_every_number(self) -> None:
        """Behind each event comes the rest, at once; behind what never was, and what may never have been, the end."""
        whole = frames(self.stream)
        last = len(whole) - 1
        for number in {0, 1, last // 3, last // 2, last - 1}:
            assert await self.behind(number) == b"".join(whole[number + 1 :]) + DONE
        assert await self.behind(last) == (renumbered(whole[-1], last + 1) if self.is_settled else b"") + DONE
        assert await self.behind(last + 1000) == renumbered(whole[-1], last + 1001) + DONE

    async def behind(self, number: int) -> bytes:
        """Its stream behind the event of that number."""
        async with asyncio.timeout(AT_ONCE):
            return await self.server.again(f"/v1/responses/{self.response_id}?stream=true&starting_after={number}")

    async def _check_cancelling(self) -> None:
        """To cancel it, as often as one likes, changes nothing; a foreground one that ended by itself is a 400."""
        is_idle = self.response["background"] or self.response["status"] == "cancelled"
        for _ in range(2):
            status, answer = await cancelled(self.server, self.response_id)
            assert (status, answer) == (200, self.response) if is_idle else status == 400

    async def _check_going_on(self) -> None:
        """It is continued if it came to an end of its own; if not, that is a 400 which says so."""
        body = {"input": "Go on.", "previous_response_id": self.response_id}
        status, answer = await self.server.post(body)
        if self.response["status"] in CONTINUED:
            assert (status, answer["status"]) == (200, "completed")
        else:
            assert (status, answer["error"]["code"]) == (400, "previous_response_unfinished")

    async def _check_conversation(self, conversation_id: str) -> None:
        """Its conversation has all of it or nothing, and takes the next response at once."""
        path = f"/v1/conversations/{conversation_id}/items?order=asc"
        _, items = await self.server.get(path)
        added = ["message", *(item["type"] for item in self.response["output"])]
        assert [item["type"] for item in items["data"]] == (added if self.response["status"] in CONTINUED else [])
        status, answer = await self.server.post({"input": "Next!", "conversation": conversation_id})
        assert (status, answer["status"]) == (200, "completed")
