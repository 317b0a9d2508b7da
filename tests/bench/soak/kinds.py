"""Short responses of every kind; each ends and is checked, and some are deleted, so that nothing remains in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import cycle
from typing import Any, TypeAlias

from tests.support.api_clients import ApiClient

Kind: TypeAlias = Callable[[ApiClient], Awaitable[object]]

CONVERSATIONS = "/v1/conversations"


async def at_once(server: ApiClient) -> None:
    await completed(server)


async def unstored(server: ApiClient) -> None:
    await completed(server, store=False)


async def streamed(server: ApiClient) -> None:
    assert is_whole(await server.stream({"input": "Hi"}))


async def in_the_background(server: ApiClient) -> None:
    assert (await server.wait_for_end(await server.start_background()))["status"] == "completed"


async def followed(server: ApiClient) -> None:
    """Stream two background responses: one to its end, one whose reader leaves and comes back."""
    assert is_whole(await server.stream({"input": "Hi", "background": True}))
    async with server.open_stream({"background": True}) as stream:
        response_id = await stream.response_id()
    assert is_whole(await server.replay(response_id))


async def continued(server: ApiClient) -> None:
    """Create a response and continue it by ``previous_response_id``."""
    first = await completed(server)
    await completed(server, previous_response_id=first)


async def conversing(server: ApiClient) -> None:
    """Create two responses in a conversation, then delete the conversation."""
    _, conversation = await server.post({}, CONVERSATIONS)
    name = conversation["id"]
    await completed(server, conversation=name)
    assert (await server.wait_for_end(await server.start_background({"conversation": name})))["status"] == "completed"
    assert (await server.delete(f"{CONVERSATIONS}/{name}"))[0] == 200


async def called_off(server: ApiClient) -> None:
    """Cancel a background response; it may complete first."""
    status, answer = await server.cancel(await server.start_background())
    assert (status, answer["status"] in ("cancelled", "completed")) == (200, True)


async def left(server: ApiClient) -> None:
    """Disconnect from a stream once the response has begun."""
    async with server.open_stream() as stream:
        response_id = await stream.response_id()
    await server.wait_for_end(response_id)


async def deleted(server: ApiClient) -> None:
    """Delete one response that may still be running, and one that has completed."""
    for response_id in (await server.start_background(), await completed(server)):
        assert (await server.delete(f"/v1/responses/{response_id}"))[0] == 200


KINDS: dict[Kind, int] = {
    at_once: 1,
    unstored: 1,
    streamed: 1,
    in_the_background: 1,
    followed: 2,
    continued: 2,
    conversing: 2,
    called_off: 1,
    left: 1,
    deleted: 2,
}
"""Each kind, and the number of responses that it makes."""


async def completed(server: ApiClient, **fields: Any) -> str:
    status, answer = await server.post({"input": "Hi", **fields})
    assert (status, answer.get("status")) == (200, "completed"), answer
    return str(answer["id"])


def is_whole(stream: bytes) -> bool:
    """Return true if a stream ends with ``response.completed`` and ``[DONE]``."""
    *_, end, done, rest = stream.split(b"\n\n")
    return (end.startswith(b"event: response.completed\n"), done, rest) == (True, b"data: [DONE]", b"")


async def soak(
    server: ApiClient, count: int, at_a_time: int = 24, tell: Callable[[int], None] = lambda made: None
) -> None:
    """Make ``count`` responses of all kinds in turn, with ``at_a_time`` workers; call ``tell`` with the number made."""
    taken_on = made = 0
    kinds = cycle(KINDS.items())

    async def work() -> None:
        nonlocal taken_on, made
        while taken_on < count:
            kind, responses = next(kinds)
            taken_on += responses
            await kind(server)
            made += responses
            tell(made)

    async with asyncio.TaskGroup() as workers:
        for _ in range(at_a_time):
            workers.create_task(work())
