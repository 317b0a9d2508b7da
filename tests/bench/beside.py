"""The costs of a token, a request and an open stream: of penstock and the other servers of an API, in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import count
from typing import Any, TypeAlias

from tests.bench import figures
from tests.bench.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api
from tests.bench.core import Case, Window
from tests.bench.figures import Comparison, Figure
from tests.bench.first_token import LONG, SHORT, long_text, request_cost, response_id, some_text, timed_answer
from tests.bench.loopback import BARE, OURS, PEER, RUST, SECONDS, Server, Servers, cost, open_stream, retained_token
from tests.bench.paced import RATE

BESIDE: Mapping[str, str] = {PEER: figures.VLLM, RUST: figures.RUST, BARE: figures.BARE}
"""The other servers, as tables name their figures."""

SPEAKING: Mapping[str, Sequence[str]] = {
    CHAT: (OURS, PEER, RUST, BARE),
    RESPONSES: (OURS, PEER, BARE),
    MESSAGES: (OURS, PEER, BARE),
    COMPLETIONS: (OURS, PEER, RUST, BARE),
}
"""The kinds of servers that have an API."""

CASE = Case(100, 1_000)

PACED, FULL = Window(round(SECONDS * RATE), 1, RATE), Window(100, 1)

AT_A_PACE = f"us a token, {CASE.streams} streams at {RATE:g} tokens/s each"
AT_FULL_SPEED = f"us a token, {CASE.streams} streams as fast as they are read"

ANSWERS, ANSWER, FAST = 20, 500, 500.0
"""Requests at once, the tokens of each answer, and tokens per second."""

SHORT_REQUEST = f"us of CPU of a request, {SHORT} tokens in, 1 out"
LONG_ANSWER = f"us of CPU of a request, a word in, {ANSWER} out"
FIRST = f"ms to the first text, {SHORT} tokens in"
FIRST_LONG = f"ms to the first text, {LONG:,} tokens in"
FIRST_KNOWN = f"ms to the first text, {LONG:,} tokens in, of which the server knows all but a few"
LONG_REQUEST = f"us of CPU of a request, {LONG:,} tokens in, 1 out"

IN_TIME = f"streams at {RATE:g} tokens/s, p99 of a token under 20 ms"

OPEN_STREAM = "KB of memory of an open stream"
RETAINED = "B of memory of a retained token"

Found: TypeAlias = Mapping[str, Sequence[float]]
"""The figures of each round, by the kind of server."""


def compared(name: str, what: str, found: Found) -> list[Comparison]:
    """Compare the figures of penstock for an API with those of each other server."""
    ours = Figure(tuple(found[OURS]))
    return [
        Comparison({}, ours, Figure(tuple(rounds)), f"{name}: {what}", BESIDE[which])
        for which, rounds in found.items()
        if which != OURS
    ]


def speaking(servers: Servers, name: str) -> Servers:
    """Return those of the running servers that have an API."""
    return {which: servers[which] for which in SPEAKING[name] if which in servers}


Figures: TypeAlias = Callable[[str, Server], Awaitable[Sequence[float]]]
"""Measures a server once, given its kind."""


async def in_turns(servers: Servers, rounds: int, measure: Figures) -> list[dict[str, list[float]]]:
    """Measure each server once in a round, and return each of the figures; a first round warms up."""
    found = [{which: await measure(which, server) for which, server in servers.items()} for _ in range(1 + rounds)]
    size = len(found[0][OURS])
    return [{which: [each[which][number] for each in found[1:]] for which in servers} for number in range(size)]


async def token_costs(servers: Servers, name: str, rounds: int) -> list[Comparison]:
    """Compare a token at a pace and at full speed, in streams that stay open."""
    api, speakers = APIS[name], speaking(servers, name)

    async def measure(_: str, server: Server) -> Sequence[float]:
        return [await cost(server, CASE, window) for window in (PACED, FULL)]

    async with AsyncExitStack() as closing:
        for server in speakers.values():
            await closing.enter_async_context(server.running(CASE, api=(api.path, api.asking("Hi"))))
        paced, full = await in_turns(speakers, rounds, measure)
    return [*compared(name, AT_A_PACE, paced), *compared(name, AT_FULL_SPEED, full)]


async def request_costs(servers: Servers, name: str, rounds: int) -> list[Comparison]:
    """Compare whole requests with `SHORT` tokens in and one out."""
    numbers, text, api = count(), some_text(SHORT), APIS[name]

    async def measure(_: str, server: Server) -> Sequence[float]:
        new = lambda: api.asking(f"{next(numbers)} {text}")  # noqa: E731
        spent, felt = await request_cost(server, new, 20, api.path)
        return spent * 1e3, felt

    spent, felt = await in_turns(speaking(servers, name), rounds, measure)
    return [*compared(name, SHORT_REQUEST, spent), *compared(name, FIRST, felt)]


async def answer_costs(servers: Servers, name: str, rounds: int) -> list[Comparison]:
    """Compare whole requests with one token in and `ANSWER` out."""

    async def measure(_: str, server: Server) -> Sequence[float]:
        return (await answer_cost(server, APIS[name]) * 1e6,)

    (spent,) = await in_turns(speaking(servers, name), rounds, measure)
    return compared(name, LONG_ANSWER, spent)


async def answer_cost(server: Server, api: Api) -> float:
    """Return the CPU seconds of a request with an answer of `ANSWER` tokens, one in a step."""
    before = await server.used()
    async with server.running(Case(ANSWERS), api=(api.path, api.asking("Hi"))):
        await server.measured(Window(ANSWER, 1, FAST))
    return (await server.used() - before) / ANSWERS


async def long_requests(servers: Servers, name: str, rounds: int) -> list[Comparison]:
    """Compare a prompt of `LONG` tokens; for Responses also one that continues it, which penstock has stored."""
    numbers, text, api, speakers = count(), long_text(), APIS[name], speaking(servers, name)
    loads: dict[tuple[str, str], Callable[[str], Mapping[str, Any]]] = {
        (LONG_REQUEST, FIRST_LONG): lambda _: api.asking(f"{next(numbers)} {text}")
    }
    if name == RESPONSES:
        first = await asyncio.to_thread(timed_answer, servers[OURS].port, api.asking(text), api.path)
        stored = response_id(first[1])
        history = [{"role": "user", "content": text}, {"role": "assistant", "content": "Hm."}]

        def going_on(which: str) -> Mapping[str, Any]:
            more = f"{next(numbers)} Go on."
            if which == OURS:
                return {"previous_response_id": stored, "input": more}
            return {"input": [*history, {"role": "user", "content": more}]}  # it stores nothing by default

        loads[f"{LONG_REQUEST}, known", FIRST_KNOWN] = going_on

    found: list[Comparison] = []
    for (cpu, first_text), asking in loads.items():

        async def measure(which: str, server: Server, asking: Callable[[str], Any] = asking) -> Sequence[float]:
            spent, felt = await request_cost(server, lambda: asking(which), 3, api.path)
            return spent * 1e3, felt

        spent, felt = await in_turns(speakers, rounds, measure)
        found += [*compared(name, cpu, spent), *compared(name, first_text, felt)]
    return found


async def memory(servers: Servers, name: str, streams: int) -> list[Comparison]:
    """Compare the memory of an open stream; the servers must be fresh."""
    api = APIS[name]
    asked = api.path, api.asking("Hi")
    found = {
        which: [await open_stream(server, streams, asked) / 1024] for which, server in speaking(servers, name).items()
    }
    return compared(name, OPEN_STREAM, found)


async def retained(servers: Servers, tokens: Mapping[str, int]) -> list[Comparison]:
    """Compare the memory of a token that penstock and vLLM's server keep; each gets a number of them."""
    found = {which: [await retained_token(servers[which], number)] for which, number in tokens.items()}
    return compared(RESPONSES, RETAINED, found)
