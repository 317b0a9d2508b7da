"""The cost of a token and of a request over each API, penstock's and vLLM's in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from tests.bench.core import Case, Window
from tests.bench.first_token import FIRST, SHORT, request_cost, some_text
from tests.bench.loopback import SECONDS, Server, Servers, cost
from tests.bench.paced import RATE
from tests.bench.wire import RESPONSES as RESPONSES_PATH

RESPONSES, CHAT, MESSAGES, COMPLETIONS = "Responses", "Chat Completions", "Messages", "Completions"
OURS, THEIRS = "ours", "vLLM's"
CASE = Case(100, 1_000)


class Api(NamedTuple):
    """The path of an API, how it is asked something, and a sign of the first text of its stream."""

    path: str
    asking: Callable[[str], Mapping[str, Any]]
    first: bytes


def _messages(text: str) -> Mapping[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 100_000}


APIS: Mapping[str, Api] = {
    RESPONSES: Api(RESPONSES_PATH, lambda text: {"input": text}, FIRST),
    CHAT: Api("/v1/chat/completions", _messages, b'"finish_reason":null'),
    MESSAGES: Api("/v1/messages", _messages, b"text_delta"),
    COMPLETIONS: Api("/v1/completions", lambda text: {"prompt": text, "max_tokens": 100_000}, b'"text"'),
}

Costs: TypeAlias = Mapping[tuple[str, str], Sequence[float]]
"""The figures of each round, by API and server."""


async def _measured(servers: Servers, rounds: int, figure: Callable[[Server, Api], Any]) -> Costs:
    """Measure each API of both servers in turns; a first round warms up."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(1 + rounds):
        for name, api in APIS.items():
            for which, server in ((OURS, servers.ours), (THEIRS, servers.peer)):
                spent = await figure(server, api)
                if number:
                    found.setdefault((name, which), []).append(spent)
    return found


async def token_costs(servers: Servers, rounds: int) -> Costs:
    """Return the microseconds of CPU per token at a rate."""
    window = Window(round(SECONDS * RATE), 1, RATE)

    async def figure(server: Server, api: Api) -> float:
        async with server.running(CASE, api=(api.path, api.asking("Hi"))):
            return await cost(server, CASE, window)

    return await _measured(servers, rounds, figure)


async def request_costs(servers: Servers, rounds: int) -> Costs:
    """Return the milliseconds of CPU of a request with `SHORT` new tokens and an answer of one."""
    numbers, text = count(), some_text(SHORT)

    async def figure(server: Server, api: Api) -> float:
        new = lambda: api.asking(f"{next(numbers)} {text}")  # noqa: E731
        return (await request_cost(server, new, 20, api.path, api.first))[0]

    return await _measured(servers, rounds, figure)


def api_table(costs: Costs) -> str:
    lines = [f"{'API':18s}{'ours':>8s}{'vLLM':>8s}{'ratio':>8s}{'to our Responses':>20s}"]
    for name in APIS:
        mine, theirs = costs[name, OURS], costs[name, THEIRS]
        ratios = [statistics.median(to(mine, other)) for other in (theirs, costs[RESPONSES, OURS])]
        medians = f"{statistics.median(mine):8.1f}{statistics.median(theirs):8.1f}"
        lines.append(f"{name:18s}{medians}{ratios[0]:8.2f}{ratios[1]:20.2f}")
    return "\n".join(lines)


def to(figures: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """Return the ratios of each round."""
    return tuple(one / other for one, other in zip(figures, others, strict=True))
