"""The share of agents' prompts that a small prefix cache holds, with hints and without: what the engine itself counts.

    python -m tests.bench.hinted MODEL [--engine "OPTIONS"] [--sessions N] [--at-once N] [--turns N] [--rounds N]

Each session has a main conversation, whose every answer is a call.  Before the result of some calls, children of the
session begin, read their instructions and the result of a call, and answer.  The model is a gpt-oss.  All rounds run on
one engine in this process: first with vLLM's own order of eviction, and then with hints.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.extensions.hints.stage import install
from penstock.services.engines.vllm import VllmEngine, plan_vllm
from tests.bench.cache_share import FUNCTION, QUESTION, Json, words
from tests.bench.engines import PATIENCE
from tests.support.server import Server, running_server

SCHEDULER = "--scheduler-cls=penstock.extensions.hints.scheduler.Scheduler"
RULES, RESULT, ANSWER = 500, 150, 100
"""Words of the instructions and of a result, and the most tokens of an answer."""
SPAWNING, MOST_CHILDREN = 0.5, 3
"""The share of the calls during which children run, and how many run at most."""


@dataclass
class Load:
    """Sessions with a server, and what their requests have found in its cache."""

    server: Server[Any]
    turns: int
    found: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"main": [], "children": []})
    """The tokens of the prompt of each request after the first of its conversation, and those that were cached."""

    async def session(self, name: str) -> None:
        """Hold a main conversation, whose children are the same in each run."""
        chance = random.Random(name)
        call, before = await self.ask("main", name, name, question_of(name), None, forced=True)
        for turn in range(self.turns):
            number = chance.randint(1, MOST_CHILDREN) if chance.random() < SPAWNING else 0
            await asyncio.gather(*(self.child(name, f"{name} {turn} {child}") for child in range(number)))
            result = result_of(call, f"{name} {turn}")
            call, before = await self.ask("main", name, name, result, before, forced=True)

    async def child(self, session: str, name: str) -> None:
        call, before = await self.ask("children", session, name, question_of(name), None, forced=True)
        await self.ask("children", session, name, result_of(call, name), before)

    async def ask(
        self, kind: str, session: str, name: str, item: Json, before: str | None, *, forced: bool = False
    ) -> tuple[str, str]:
        """Send one item; return the id of the call that answers it, if one does, and of the response."""
        body: Json = {
            "model": self.server.engine.models[0],
            "instructions": f"{name}. {words(RULES, name)}",
            "input": [item],
            "previous_response_id": before,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": FUNCTION["name"]} if forced else "auto",
            "max_output_tokens": ANSWER,
            "temperature": 0,
        }
        url, headers = f"{self.server.url}/v1/responses", {"session-id": session}
        async with self.server.client.post(url, json=body, headers=headers, timeout=PATIENCE) as answer:
            read: Json = await answer.json()
            if answer.status != 200:
                raise RuntimeError(read)
        usage = read["usage"]
        if before:
            self.found[kind].append((usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]))
        return next((each["call_id"] for each in read["output"] if each["type"] == "function_call"), ""), read["id"]


def question_of(name: str) -> Json:
    """Return a first message that no other conversation has: it is what penstock knows a conversation by."""
    return {"role": "user", "content": f"{name}: {QUESTION}"}


def result_of(call: str, name: str) -> Json:
    """Return the result of a call; a message, if the answer was cut before its call."""
    text = words(RESULT, name)
    if not call:
        return {"role": "user", "content": text}
    return {"type": "function_call_output", "call_id": call, "output": text}


async def run(engine: VllmEngine, chosen: argparse.Namespace, round_: int, *, hinted: bool) -> str:
    """Hold all sessions with a server of its own; return a line of what they have found."""
    engine = replace(engine, _takes_hints=hinted, _stopping=asyncio.Event())  # the end of a server stops its engine
    assert await engine.llm.reset_prefix_cache()
    edit: Any = install if hinted else lambda pipeline: pipeline
    with TemporaryDirectory() as folder:
        async with running_server(engine, Path(folder), edit=edit, max_body_bytes=10**6) as server:
            load, places = Load(server, chosen.turns), asyncio.Semaphore(chosen.at_once)
            begun = time.monotonic()

            async def session(number: int) -> None:
                async with places:
                    await load.session(f"{round_} session {number}")

            await asyncio.gather(*map(session, range(chosen.sessions)))
            seconds = time.monotonic() - begun
    line = "with hints  " if hinted else "vLLM's order"
    for kind, found in load.found.items():
        prompts, cached = (sum(each) for each in zip(*found, strict=True))
        line += f"{kind:>9s}: {cached / prompts:6.1%} of {prompts:9,d} tokens cached, {prompts - cached:8,d} read anew"
    return f"{line}, {seconds:5.0f} s"


async def main(chosen: argparse.Namespace) -> None:
    """Run both sides, and write a line for each round."""
    engine = plan_vllm(chosen.model, [*shlex.split(chosen.engine), SCHEDULER]).start()
    try:
        for hinted in (False, True):
            for round_ in range(chosen.rounds):
                sys.stdout.write(f"{await run(engine, chosen, round_, hinted=hinted)}\n")
                sys.stdout.flush()
    finally:
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--engine", default="", help="options of the engine, in one word")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    asyncio.run(main(parser.parse_args()))
