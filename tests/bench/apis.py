"""The cost of a token over each API, penstock's and vLLM's in turns, at the pace of a model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.bench.core import Case, Window
from tests.bench.loopback import ASKING_RESPONSES, SECONDS, Api, Servers, cost
from tests.bench.paced import RATE

_MESSAGES = [{"role": "user", "content": "Hi"}]
RESPONSES, CHAT, MESSAGES = "Responses", "Chat Completions", "Messages"
APIS: Mapping[str, Api] = {
    RESPONSES: ASKING_RESPONSES,
    CHAT: ("/v1/chat/completions", {"messages": _MESSAGES}),
    MESSAGES: ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 100_000}),
}
CASE = Case(100, 1_000)


async def api_costs(servers: Servers, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the microseconds per token of each round, by API and server; a first round warms up."""
    window, found = Window(round(SECONDS * RATE), 1, RATE), dict[tuple[str, str], list[float]]()
    for number in range(1 + rounds):
        for name, api in APIS.items():
            for which, server in (("ours", servers.ours), ("vLLM's", servers.peer)):
                async with server.running(CASE, api=api):
                    spent = await cost(server, CASE, window)
                if number:
                    found.setdefault((name, which), []).append(spent)
    return found


def api_table(costs: Mapping[tuple[str, str], Sequence[float]]) -> str:
    lines = [f"{'API':18s}{'ours':>8s}{'vLLM':>8s}{'ratio':>8s}{'to our Responses':>20s}"]
    for name in APIS:
        mine, theirs = costs[name, "ours"], costs[name, "vLLM's"]
        beside = [(mine, theirs), (mine, costs[RESPONSES, "ours"])]
        ratios = [statistics.median(one / other for one, other in zip(*pair, strict=True)) for pair in beside]
        medians = f"{statistics.median(mine):8.1f}{statistics.median(theirs):8.1f}"
        lines.append(f"{name:18s}{medians}{ratios[0]:8.2f}{ratios[1]:20.2f}")
    return "\n".join(lines)
