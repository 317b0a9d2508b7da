"""Reduction of a failing plan to the actions that its fault needs."""

from __future__ import annotations

from penstock.pipeline.recordings.ddmin import minimal
from tests.simulation.plan import Action
from tests.simulation.simulation import Outcome, simulate


def shrunk(outcome: Outcome) -> Outcome:
    """Return the outcome of a plan with as few actions as keep its fault, which may show in another response."""
    plan, kind, best = outcome.plan, outcome.kind, outcome

    def fails(actions: tuple[Action, ...]) -> bool:
        nonlocal best
        tried = simulate(plan.only({action.number for action in actions}))
        if tried.fault and tried.kind == kind:
            best = tried
            return True
        return False

    minimal(plan.actions, fails, coarse=True)
    return best
