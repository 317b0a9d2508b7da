"""Plans: what clients do in a simulation, and which faults there are.  A seed makes a plan.

Each action draws its own randomness from the seed and its number.  So an action that is left out changes little of the
others, and a failing plan can be reduced.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace

CLIENTS = {
    "ask": 10,
    "talk": 3,
    "read": 4,
    "cancel": 2,
    "delete": 1,
    "snoop": 1,
    "burst": 2,
    "flood": 1,
    "socket": 2,
    "chat": 2,
    "messages": 2,
    "file": 2,
}
"""The actions of clients, with their weights."""

BATCHES = {"batch": 2, "message batch": 2}
"""The clients of batches, with their weights: some plans have both."""

PROGRAMS = {"program": 4}
"""The clients whose functions programs call: some plans have them."""

FAULTS = {
    "deaths": {"kill": 2, "doom": 3, "strike": 5, "stop": 2},
    "disk": {"slow disk": 3, "full disk": 2, "lost commits": 3},
    "network": {"break": 6, "cut": 2},
    "pauses": {"pause": 1},
    "webhooks": {"unhook": 3},
}
"""The faults of each group, with their weights."""

MODELS = "models"
"""Among the kinds that are asked for: servers of several models."""

MAKERS = frozenset({"ask", "talk"})
"""Clients that are in each plan, as others need their responses."""

SECONDS = 40.0
"""The most seconds of a plan in which actions begin."""


@dataclass(frozen=True)
class Action:
    """An action of a client or a fault, which begins ``at`` a time."""

    number: int
    at: float
    kind: str

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} at {self.at:.1f} s"


@dataclass(frozen=True)
class Plan:
    """The plan of a seed: the actions and faults of its simulation."""

    seed: int
    servers: int
    actions: tuple[Action, ...]
    resumes: bool
    """True if the servers have ``--resume-interrupted``."""
    postgres: str = ""
    """The URL of the PostgreSQL that has the store; without one, it is a file of SQLite."""
    has_models: bool = False
    """True if the servers have several models, of which one is up at a time, and some servers have only the first."""

    def only(self, numbers: Collection[int]) -> Plan:
        """Return the plan with some of its actions."""
        return replace(self, actions=tuple(action for action in self.actions if action.number in numbers))

    def has(self, *groups: str) -> bool:
        """Return True if the plan has faults of one of the groups."""
        kinds = {kind for group in groups for kind in FAULTS[group]}
        return any(action.kind in kinds for action in self.actions)


def plan_of(seed: int, kinds: Collection[str] = (), postgres: str = "") -> Plan:
    """Return the plan of a seed, with some of the kinds of actions, which the seed chooses unless they are given."""
    draw = random.Random(f"{seed} plan")
    faults = {kind: weight for group in FAULTS.values() if draw.random() < 0.5 for kind, weight in group.items()}
    clients = {kind: weight for kind, weight in CLIENTS.items() if kind in MAKERS or draw.random() < 0.6}
    if not kinds and random.Random(f"{seed} batches").random() < 0.5:
        clients |= BATCHES
    if not kinds and random.Random(f"{seed} programs").random() < 0.4:
        clients |= PROGRAMS
    if kinds:
        clients = {kind: weight for kind, weight in (CLIENTS | BATCHES | PROGRAMS).items() if kind in kinds}
        faults = {kind: weight for group in FAULTS.values() for kind, weight in group.items() if kind in kinds}
    seconds = draw.uniform(SECONDS / 6, SECONDS)
    drawn = draw.choices([*clients], [*clients.values()], k=draw.randint(6, 24))
    if faults:
        drawn += draw.choices([*faults], [*faults.values()], k=draw.randint(1, 6))
    times = [draw.uniform(0.0, seconds) for _ in drawn]
    actions = [Action(number, at, kind) for number, (at, kind) in enumerate(zip(times, drawn, strict=True))]
    has_models = MODELS in kinds if kinds else random.Random(f"{seed} models").random() < 0.3
    return Plan(seed, draw.randint(1, 3), tuple(actions), draw.random() < 0.4, postgres, has_models)
