"""Sessions of coding agents: long contexts, short answers, calls of tools, people between, and agents that they start.

Where the values come from:

* Turns, prompts and answers, and the share of the sessions that start agents: the traces that InferenceX replays
  (https://github.com/SemiAnalysisAI/InferenceX/issues/1632), where a quarter of all requests are those of such agents.
* Steps of a request, lengths of results, and the times of tools and people: TraceLab (https://arxiv.org/abs/2606.30560).
* The shares of the tools, and openings: assumptions, with which the calls of all tools take the times of TraceLab.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp

from tests.bench.fleet.engine import Speed
from tests.bench.fleet.traffic import (
    AGENT,
    COMPACTED,
    Draw,
    Kind,
    Quantiles,
    Talk,
    Turn,
    constant,
    geometric,
    lognormal,
)

CODER = Kind(
    "coder",
    share=1.0,
    openings=4,
    opening=24_000,
    requests=constant(1),
    steps=AGENT.steps,
    fresh=lognormal(400, 0.9, 2_750, 30_000),
    answer=lognormal(444, 0.9, 1_800, 8_000),
    between_steps=constant(0),
    between_requests=lognormal(84, 0.9, 1_236, 3_600),
    context=480_000,
)
HELPER = Kind(
    "helper",
    share=0.0,
    openings=4,
    opening=12_000,
    requests=constant(1),
    steps=constant(2_000),
    fresh=lognormal(900, 0.9, 5_000, 30_000),
    answer=CODER.answer,
    between_steps=constant(0),
    between_requests=constant(0),
)

TURNS = {CODER: lognormal(43, 0.9, 330, 2_000), HELPER: lognormal(9, 0.9, 30, 100)}

FIRST = lognormal(30_000, 0.9, 70_000, 100_000)
"""Tokens of a first prompt after its opening: memories, files, and the task."""

HAVE_HELPERS = 0.85
"""Share of the sessions that can start agents: in the others none is offered; 44% of all do."""

STARTS = 1 / 55
"""Share of the calls in such a session that start some."""

HELPERS = geometric(2, 5)
"""Agents that start at a time."""

PERSON, AGENTS = "person", "agents"
"""What a turn waits for if no tool is called, and the tool that starts agents."""

TOOLS: tuple[tuple[str, float, Quantiles], ...] = (
    ("read", 0.34, lognormal(0.036, 0.9, 0.2, 10)),
    ("edit", 0.16, lognormal(0.095, 0.9, 0.4, 10)),
    ("search", 0.12, lognormal(0.06, 0.9, 0.6, 30)),
    ("shell", 0.34, lognormal(0.8, 0.9, 50, 1_800)),
    ("web", 0.04, lognormal(4, 0.9, 20, 120)),
)
"""The tools, their shares of the calls, and the seconds that a call takes."""

MET = lognormal(43 * exp(1.6**2), 0.9, 330 * exp(1.6**2), 2_000)
"""Turns of the sessions that one meets: the more turns one has, the more often."""


@dataclass(frozen=True, slots=True)
class Step:
    """A turn, and what brings the next one."""

    fresh: int
    answer: int
    call: str
    """The tool that it calls, or `PERSON`."""
    gap: float
    """Seconds until the next turn begins; agents have their own."""


@dataclass(eq=False, slots=True)
class Session(Talk):
    """A session of a coding agent, or of one that it has started; what it will do is drawn at once, for an oracle."""

    script: tuple[Step, ...] = ()
    done: int = 0
    """Turns that have ended."""
    parent: Session | None = None
    helpers: list[Session] = field(default_factory=list)
    """The agents that it waits for."""
    summary: int = 0
    """Tokens of the summary with which its next prompt begins, after a compaction."""

    @property
    def step(self) -> Step:
        """The turn that is next, or goes on."""
        return self.script[self.done]

    @property
    def is_over(self) -> bool:
        return self.done == len(self.script)

    def turn(self, penstocks: int) -> Turn:
        return Turn(self, self.step.fresh + self.summary, self.step.answer, self.draw.number() % penstocks)

    @property
    def prompt(self) -> int:
        """The tokens of its next prompt."""
        return self.opening_tokens + self.history + self.step.fresh + self.summary

    def add(self) -> Step:
        """Add the next turn to the history, and return it."""
        step = self.step
        self.history += step.fresh + self.summary + step.answer
        self.done, self.summary = self.done + 1, 0
        if self.opening_tokens + self.history > self.kind.context:
            self.history, self.compactions, self.summary = 0, self.compactions + 1, COMPACTED
        return step

    def left(self, speed: Speed) -> float:
        """Return the seconds that its turns take at least."""
        steps = self.script[self.done :]
        return sum(step.gap + step.answer / speed.stream + step.fresh / speed.prefill for step in steps)


class Sessions:
    """The sessions of a fleet, which are drawn from their numbers alone."""

    def __init__(self, begun: int = 0) -> None:
        self._begun = begun

    def open(self, number: int) -> Iterator[Session]:
        """Yield sessions in mid-life."""
        for _ in range(number):
            session = self.new(turns=MET)
            for _ in range(session.draw.number() % len(session.script)):
                session.add()
            yield session

    def new(self, kind: Kind = CODER, parent: Session | None = None, turns: Quantiles | None = None) -> Session:
        """Return a session that begins."""
        self._begun += 1
        draw = Draw(self._begun)
        opening = f"{kind.name} {int((kind.openings + 1) ** (draw.number() / 2**31))}"
        session = Session(self._begun, kind, opening, kind.opening, draw, parent=parent)
        number, has_helpers = int(draw.of(turns or TURNS[kind])) or 1, parent is None and _is(draw, HAVE_HELPERS)
        session.script = tuple(_script(kind, draw, number, has_helpers=has_helpers))
        return session

    def helpers(self, parent: Session) -> list[Session]:
        """Return the agents that a session starts."""
        return [self.new(HELPER, parent) for _ in range(int(parent.draw.of(HELPERS)))]


def _script(kind: Kind, draw: Draw, turns: int, *, has_helpers: bool) -> Iterator[Step]:
    fresh, steps = int(draw.of(FIRST)), int(draw.of(kind.steps)) + 1
    for left in reversed(range(turns)):
        steps -= 1
        if not steps or not left:
            call, gap = PERSON, draw.of(kind.between_requests)
            steps = int(draw.of(kind.steps)) + 1
        elif has_helpers and _is(draw, STARTS):
            call, gap = AGENTS, 0.0
        else:
            call, gap = _call(draw)
        yield Step(fresh, int(draw.of(kind.answer)) + 1, call, gap)
        fresh = int(draw.of(kind.fresh)) + 1


def _call(draw: Draw) -> tuple[str, float]:
    """Return a tool, and how long its call takes."""
    number, ends = draw.number() / 2**31, accumulate(share for _, share, _ in TOOLS)
    name, _, seconds = next(tool for tool, end in zip(TOOLS, ends, strict=True) if number < end)
    return name, draw.of(seconds)


def _is(draw: Draw, share: float) -> bool:
    return draw.number() / 2**31 < share
