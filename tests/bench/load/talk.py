"""One conversation with the server: its requests, drawn from the seed and its number alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, TypeAlias

from tests.bench.load.plan import Plan, drawn
from tests.support.paths import ROOT

Item: TypeAlias = dict[str, Any]

ROUNDS = 8
"""Times that one turn may call tools."""

POOL = 2**17
"""Words from which messages are cut, each at a place of its own."""


@dataclass(frozen=True)
class Reading:
    """The way in which a client reads one stream."""

    deltas: int | None = None
    """Deltas after which it closes the stream."""
    bytes_per_second: int | None = None


@cache
def pool() -> list[str]:
    words = (ROOT / "fixtures" / "tiny_gpt_oss" / "words.txt").read_text().split()
    return Random("words").choices(words, k=POOL)


def text(random: Random, size: int) -> str:
    """Return ``size`` words, which hardly ever begin like another text."""
    at, words = random.randrange(POOL), pool()
    return " ".join(words[(at + place) % POOL] for place in range(size))


def tools(count: int) -> Iterator[Item]:
    """Yield function tools; the first is one that the tiny gpt-oss calls."""
    for name in ("get_weather", *(f"look_up_{number}" for number in range(2, count + 1)))[:count]:
        city = {"type": "string", "description": "The name of a city."}
        parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
        description = f"Get facts about a city: {name}."
        yield {"type": "function", "name": name, "description": description, "parameters": parameters, "strict": False}


def is_cut(item: Item) -> bool:
    return item.get("type") == "function_call" and item.get("status") == "incomplete"


@dataclass
class Talk:
    plan: Plan
    number: int
    random: Random = field(init=False)
    _instructions: str | None = field(init=False)
    _before: list[Item] = field(default_factory=list)
    _new: list[Item] = field(default_factory=list)
    _previous: str | None = None
    _turns: int = 1
    _rounds: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.random = Random(f"{plan.seed}/{self.number}")
        group = self.random.randrange(plan.groups)
        prefix = text(Random(f"{plan.seed}/group {group}"), plan.shared_prefix)
        self._instructions = prefix or None
        self._new = [self._message()]

    def reading(self) -> Reading:
        """Draw the way in which the next stream is read."""
        cancels, is_slow = self.random.random() < self.plan.cancel, self.random.random() < self.plan.slow
        half = max(1, drawn(self.plan.output, self.random) // 2)
        deltas = self.random.randint(1, half)
        return Reading(deltas if cancels else None, self.plan.slow_bytes if is_slow else None)

    def body(self, model: str) -> Item:
        """Return the next request."""
        plan, is_stored = self.plan, self.plan.history == "stored"
        body: Item = {"model": model, "stream": True, "store": is_stored}
        body["input"] = self._new if is_stored else [*self._before, *self._new]
        body["max_output_tokens"] = max(16, drawn(plan.output, self.random))
        if self._instructions:
            body["instructions"] = self._instructions
        if is_stored and self._previous:
            body["previous_response_id"] = self._previous
        if plan.tools:
            body["tools"] = list(tools(plan.tools))
        return body | plan.body

    def goes_on(self, response: Item) -> bool:
        """Take an answer, and return True if the conversation has another request."""
        output = [item for item in response.get("output", []) if not is_cut(item)]
        self._before += [*self._new, *output]
        self._previous = response.get("id")
        calls = [item["call_id"] for item in output if item.get("type") == "function_call"]
        if calls:
            self._rounds += 1
            self._new = [self._output(call) for call in calls]
            return self._rounds <= ROUNDS
        self._turns, self._rounds = self._turns + 1, 0
        self._new = [self._message()]
        return self._turns <= self.plan.turns

    def _message(self) -> Item:
        words = text(self.random, drawn(self.plan.prompt, self.random))
        return {"type": "message", "role": "user", "content": f"{words}. {self.plan.question}"}

    def _output(self, call: str) -> Item:
        output = text(self.random, drawn(self.plan.tool_output, self.random))
        return {"type": "function_call_output", "call_id": call, "output": output}
