"""Conversations of several turns, continued in each of the ways that a client has."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from statistics import mean
from typing import Any

from penstock.services.engines.vllm_http import VllmHttpEngine
from tests.support.api_clients import Json
from tests.support.server import Server

TURNS = 4
SHARED, FIRST, LATER, ANSWER = 400, 300, 60, 16
"""Words of the instructions, of the first question and of later ones, and tokens of an answer."""

WORDS = ("river", "stone", "lamp", "paper", "green", "winter", "seven", "window", "garden", "bread", "silver", "music")
WAYS = ("previous_response_id", "conversation", "sent again", "sent again with prompt_cache_key")

HEADER = (
    "| choice | at once | cached of later turns | tokens not cached | highest load / mean | seconds |"
    "\n|---|---|---|---|---|---|"
)


@dataclass
class Load:
    """A load over ``servers``; prompts share their beginning only within one load.

    ``key`` is a ``prompt_cache_key`` for all conversations.
    """

    name: str
    servers: list[Server[VllmHttpEngine]]
    conversations: int
    at_once: int
    key: str = ""
    prompted: list[tuple[int, int, int]] = field(default_factory=list)
    """The number of a turn, the tokens of its prompt, and how many of them were cached."""
    loads: list[list[int]] = field(default_factory=list)
    """The generations on each engine, at the start of each turn."""

    async def run(self) -> str:
        """Run the conversations; return a row of a table."""
        begun, places = time.perf_counter(), asyncio.Semaphore(self.at_once)
        await asyncio.gather(*(self._converse(number, places) for number in range(self.conversations)))
        seconds = time.perf_counter() - begun
        later = [(prompt, cached) for turn, prompt, cached in self.prompted if turn]
        share = sum(cached for _, cached in later) / sum(prompt for prompt, _ in later)
        rest = sum(prompt - cached for _, prompt, cached in self.prompted)
        peak = mean(max(loads) / mean(loads) for loads in self.loads if any(loads))
        return f"{self.at_once} | {share:.0%} | {rest:,} | {peak:.2f} | {seconds:.0f} |"

    async def _converse(self, number: int, places: asyncio.Semaphore) -> None:
        way = WAYS[number % len(WAYS)]
        body: Json = {"instructions": text(SHARED, self.name), "max_output_tokens": ANSWER, "temperature": 0}
        if self.key or way == WAYS[3]:
            body["prompt_cache_key"] = self.key or f"{self.name} {number}"
        if way == "conversation":
            path = await self.servers[0].create_conversation()
            body["conversation"] = path.rpartition("/")[2]
        sent: list[Any] = []
        for turn in range(TURNS):
            question = text(LATER if turn else FIRST, f"{self.name} {number} {turn}")
            sent.append({"role": "user", "content": question})
            async with places:
                answer = await self._turn(number + turn, body | {"input": sent})
            self._count(turn, answer["usage"])
            if way.startswith("sent again"):
                sent += answer["output"]
            else:
                sent.clear()
            if way == "previous_response_id":
                body["previous_response_id"] = answer["id"]

    async def _turn(self, number: int, body: Json) -> Json:
        self.loads.append(
            [
                sum(len(replica.running) for replica in replicas)
                for replicas in zip(*(server.engine.replicas.all for server in self.servers), strict=True)
            ]
        )
        status, answer = await self.servers[number % len(self.servers)].post(body)
        if status != 200 or answer["status"] == "failed":
            raise RuntimeError(f"An engine has failed: {answer['error']}")
        return dict(answer)

    def _count(self, turn: int, usage: Json) -> None:
        self.prompted.append((turn, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]))


def text(length: int, seed: str) -> str:
    """Return that many words, the same for the same seed."""
    return " ".join(Random(seed).choices(WORDS, k=length))
