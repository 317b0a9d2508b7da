"""The share of a tool conversation that the engine finds in its prefix cache, by each way to continue.

    python -m tests.bench.cache_share MODEL [--engine "OPTIONS"] [--penstock "OPTIONS"] [--peer "OPTIONS"] [--turns N]

A client asks a question, gets a call, sends its result, gets an answer, and asks again.  Each way to continue is a
conversation of its own: its instructions begin with words that no other has.  `penstock serve` and `vllm serve` run one
after the other, each with its own engine.

The share is that of vLLM's counters, ``vllm:prefix_cache_hits`` over ``vllm:prefix_cache_queries``, from the second
request on.  ``kept`` is the share of what the engine has had before, each prompt and each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.bench.engines import PATIENCE, Serving, serving
from tests.bench.loopback import SERVE
from tests.bench.session import counted
from tests.support.engine_requests import WEATHER_TOOL

FOLDER = Path(".cache/bench")
TURNS = 20
"""Requests of a conversation."""
ANSWER = 60
"""The most tokens of an answer."""
QUESTION = "What is the weather in Paris?"
"""The tiny models are trained to answer this with a call."""

Json = dict[str, Any]

PARAMETERS = WEATHER_TOOL["parameters"]
FUNCTION = {"name": WEATHER_TOOL["name"], "description": WEATHER_TOOL.get("description", ""), "parameters": PARAMETERS}


def words(count: int, seed: str) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(("river", "stone", "cloud", "light", "seven", "north")) for _ in range(count))


class Shared(NamedTuple):
    """The tokens of a conversation's prompts after the first, those in the cache, and those that the engine had had."""

    prompts: int
    cached: int
    known: int

    def __str__(self) -> str:
        share, kept = self.cached / self.prompts, self.cached / self.known
        return f"{self.prompts:9,d} tokens{share:8.1%} cached{kept:8.1%} kept{self.prompts - self.cached:8,d} read anew"


Way = Callable[["Talk"], AsyncIterator[tuple[int, int]]]
"""A way to continue: it yields the tokens of the prompt and of the answer of each request."""


class Talk:
    """One conversation with a server, of a number of requests."""

    def __init__(self, server: Serving, name: str, turns: int) -> None:
        self.server = server
        self.turns = turns
        self.rules = f"{name}. {words(300, name)}"
        self.call = ""
        """The id of the call that waits for its result, if the last answer was one."""

    def steps(self) -> Iterator[str]:
        """Yield what the client sends in each request, as a question or as the result of the call before it."""
        for number in range(self.turns):
            yield QUESTION if self.call == "" else f"{number}: {words(60, 'result')}"

    async def post(self, path: str, body: Mapping[str, Any]) -> Json:
        body = {"model": self.server.model, "temperature": 0, **body}
        async with self.server.client.post(f"{self.server.url}{path}", json=body, timeout=PATIENCE) as answer:
            read: Json = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"{path}: {read}")
            return read


async def responses(talk: Talk, *, stored: bool) -> AsyncIterator[tuple[int, int]]:
    """Continue by ``previous_response_id``, or by all items with their sealed thoughts."""
    items: list[Json] = []
    before = None
    rest = {"instructions": talk.rules, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": ANSWER}
    for text in talk.steps():
        result = {"type": "function_call_output", "call_id": talk.call, "output": text}
        items.append(result if talk.call else {"role": "user", "content": text})
        way: Json = (
            {"input": items[-1:], "previous_response_id": before} if stored else {"input": items, "store": False}
        )
        answer = await talk.post("/v1/responses", way | rest)
        items += answer["output"]
        before = answer["id"]
        talk.call = next((each["call_id"] for each in answer["output"] if each["type"] == "function_call"), "")
        yield answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]


async def chat(talk: Talk) -> AsyncIterator[tuple[int, int]]:
    """Continue by all messages, each with its reasoning."""
    messages: list[Json] = [{"role": "system", "content": talk.rules}]
    rest = {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": ANSWER}
    for text in talk.steps():
        result = {"role": "tool", "tool_call_id": talk.call, "content": text}
        messages.append(result if talk.call else {"role": "user", "content": text})
        answer = await talk.post("/v1/chat/completions", {"messages": messages, **rest})
        message = {name: value for name, value in answer["choices"][0]["message"].items() if value}
        messages.append(message)
        talk.call = message["tool_calls"][0]["id"] if message.get("tool_calls") else ""
        yield answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


async def messages_api(talk: Talk) -> AsyncIterator[tuple[int, int]]:
    """Continue by all messages of the Messages API, each with its thinking."""
    messages: list[Json] = []
    schema = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": PARAMETERS}
    rest = {"system": talk.rules, "tools": [schema], "max_tokens": ANSWER}
    for text in talk.steps():
        result = [{"type": "tool_result", "tool_use_id": talk.call, "content": text}]
        messages.append({"role": "user", "content": result if talk.call else text})
        answer = await talk.post("/v1/messages", {"messages": messages, **rest})
        messages.append({"role": "assistant", "content": answer["content"]})
        talk.call = next((part["id"] for part in answer["content"] if part["type"] == "tool_use"), "")
        usage = answer["usage"]
        read = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
        yield read + (usage.get("cache_creation_input_tokens") or 0), usage["output_tokens"]


def by_id(talk: Talk) -> AsyncIterator[tuple[int, int]]:
    return responses(talk, stored=True)


def by_items(talk: Talk) -> AsyncIterator[tuple[int, int]]:
    return responses(talk, stored=False)


WAYS: Mapping[str, Mapping[str, Way]] = {
    "penstock": {"previous_response_id": by_id, "items": by_items, "chat": chat, "messages": messages_api},
    "vllm": {"items": by_items, "chat": chat, "messages": messages_api},
}


async def shared(server: Serving, name: str, way: Way, turns: int) -> Shared:
    """Hold a conversation, and count its tokens from the second request on."""
    lengths: list[tuple[int, int]] = []
    begun = (0, 0)
    async for length in way(Talk(server, name, turns)):
        lengths.append(length)
        if len(lengths) == 1:
            begun = await counters(server)
    queries, hits = (after - before for after, before in zip(await counters(server), begun, strict=True))
    return Shared(queries, hits, sum(map(sum, lengths[:-1])))


async def counters(server: Serving) -> tuple[int, int]:
    """Return the tokens that the engine looked up in its cache so far, and those that it found."""
    async with server.client.get(f"{server.url}/metrics") as answer:
        metrics = await answer.text()
    return counted(metrics, "queries"), counted(metrics, "hits")


async def main(chosen: argparse.Namespace) -> None:
    """Hold all conversations, and write a line for each."""
    engine = shlex.split(chosen.engine)
    with TemporaryDirectory() as folder:
        ours = (*engine, *shlex.split(chosen.penstock), "--store", f"{folder}/store.sqlite3")
        commands: Mapping[str, Sequence[str]] = {
            "penstock": (str(SERVE / "penstock"), "serve", chosen.model, *ours),
            "vllm": (str(SERVE / "vllm"), "serve", chosen.model, *engine, *shlex.split(chosen.peer)),
        }
        for server_name, command in commands.items():
            async with serving(command, FOLDER / f"cache-{server_name}.log") as server:
                for name, way in WAYS[server_name].items():
                    try:
                        line = str(await shared(server, f"{server_name} {name}", way, chosen.turns))
                    except RuntimeError as error:
                        line = f"failed: {error}"
                    sys.stdout.write(f"{server_name:9s}{name:22s}{line}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--engine", default="", help="options for both, in one word")
    parser.add_argument("--penstock", default="", help="options for penstock serve")
    parser.add_argument("--peer", default="", help="options for vllm serve, such as its parsers")
    parser.add_argument("--turns", type=int, default=TURNS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(parser.parse_args()))
