"""A session of Claude Code over the Messages API of `penstock serve` and `vllm serve`: how much of it is cached.

    python -m tests.bench.session MODEL [--engine "OPTIONS"] [--peer "OPTIONS"]

``make test-claude`` captures the session.  Each server runs an engine of its own, one after the other.  The bodies are
those of Claude Code, with the answers of the server in place of those that it got.  The share is that of vLLM's own
counters, ``vllm:prefix_cache_hits`` over ``vllm:prefix_cache_queries``.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.bench.engines import PATIENCE, Serving, serving
from tests.bench.loopback import SERVE
from tests.support.claude_session import Json, captured, next_body

FOLDER = Path(".cache/bench")
ANSWER = 400
"""The most tokens of an answer."""

NO_ANSWER: Sequence[Json] = [{"type": "text", "text": "(no answer)"}]
"""The answer of a request that failed: vLLM's server fails if it cannot read the arguments of a call."""


class Played(NamedTuple):
    """The cost of a session: tokens of all prompts, those that the engine found in its cache, seconds, and failures."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float
    failed: int

    def __str__(self) -> str:
        share = self.cached_tokens / self.prompt_tokens
        tokens = f"{self.prompt_tokens:9,d} tokens{self.cached_tokens:10,d} cached{share:8.1%}"
        return f"{tokens}{self.seconds:8.1f} s, {self.failed} failed"


async def played(server: Serving, bodies: Sequence[Json]) -> Played:
    """Play a session on a server that has had no other."""
    answers: list[Sequence[Json]] = []
    failed = 0
    begun = time.perf_counter()
    for _ in bodies:
        body = next_body(bodies, answers, server.model) | {"stream": False, "max_tokens": ANSWER, "temperature": 0}
        async with server.client.post(f"{server.url}/v1/messages", json=body, timeout=PATIENCE) as answer:
            failed += answer.status != 200
            answers.append((await answer.json())["content"] if answer.status == 200 else NO_ANSWER)
    seconds = time.perf_counter() - begun
    async with server.client.get(f"{server.url}/metrics") as answer:
        metrics = await answer.text()
    return Played(counted(metrics, "queries"), counted(metrics, "hits"), seconds, failed)


def counted(metrics: str, what: str) -> int:
    """Return the sum of a counter of the prefix cache."""
    values = re.findall(rf"^vllm:prefix_cache_{what}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    return round(sum(map(float, values)))


async def main(model: str, engine: Sequence[str], peer: Sequence[str]) -> None:
    """Play the session on both servers, and write a line for each."""
    with TemporaryDirectory() as folder:
        commands = {
            "penstock": (str(SERVE / "penstock"), "serve", model, *engine, "--store", f"{folder}/store.sqlite3"),
            "vllm": (str(SERVE / "vllm"), "serve", model, *engine, *peer),
        }
        for name, command in commands.items():
            async with serving(command, FOLDER / f"session-{name}.log") as server:
                sys.stdout.write(f"{name:10s}{await played(server, captured())}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--engine", default="", help="options for both, in one word")
    parser.add_argument("--peer", default="", help="options for vllm serve, such as its parsers")
    chosen = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(chosen.model, shlex.split(chosen.engine), shlex.split(chosen.peer)))
