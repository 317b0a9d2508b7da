"""Conversations with parallel calls whose outputs come in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st

from penstock.pipeline.protocol import items
from tests.support.harmony import (
    call,
    custom_call,
    custom_output,
    mcp_call,
    message,
    output,
    reasoning,
    shell_call,
    shell_output,
)

CALLS: Mapping[str, Callable[[str, str], items.Item]] = {
    "function": lambda text, call_id: call("f", text, call_id),
    "of a namespace": lambda text, call_id: call("f", text, call_id, namespace="team"),
    "custom": lambda text, call_id: custom_call("f", text, call_id),
    "shell": lambda text, call_id: shell_call(text, call_id=call_id, here=False),
}
OUTPUTS: Mapping[str, Callable[[str, str], items.Item]] = {
    "function": output,
    "of a namespace": output,
    "custom": custom_output,
    "shell": lambda text, call_id: shell_output({"stdout": text}, call_id=call_id),
}


@dataclass(frozen=True)
class Parallel:
    """A turn with parallel calls: what precedes them, the calls, what the server ran, and the outputs in an order."""

    before: tuple[items.Item, ...]
    calls: tuple[items.Item, ...]
    served: tuple[items.Item, ...]
    outputs: tuple[items.Item, ...]
    order: tuple[int, ...]

    @property
    def as_sent(self) -> tuple[items.Item, ...]:
        """The items with the outputs in the client's order."""
        return (*self.before, *self.calls, *self.served, *(self.outputs[at] for at in self.order))

    @property
    def in_order(self) -> tuple[items.Item, ...]:
        """The items with the outputs in the order of the calls."""
        return (*self.before, *self.calls, *self.served, *self.outputs)

    @property
    def behind(self) -> tuple[items.Item, ...]:
        """The items with each output behind its call."""
        return (*self.before, *chain.from_iterable(zip(self.calls, self.outputs, strict=True)), *self.served)


BEFORE: Sequence[Callable[[str], items.Item]] = [
    lambda text: message("user", text),
    lambda text: message("assistant", text),
    lambda text: message("developer", text),
    reasoning,
    lambda text: mcp_call("read", "{}", text),
]


@st.composite
def parallel_turns(draw: st.DrawFn) -> list[Parallel]:
    """Draw some turns, which may reuse the ids of calls."""
    return [draw(parallel_calls(at)) for at in range(draw(st.integers(1, 4)))]


@st.composite
def parallel_calls(draw: st.DrawFn, turn: int = 0) -> Parallel:
    """Draw the turn at this place."""
    kinds = draw(st.lists(st.sampled_from(sorted(CALLS)), max_size=4))
    first = draw(st.sampled_from([0, turn * 4]))
    ids = [f"call_{first + at}" for at in range(len(kinds))]
    return Parallel(
        before=tuple(make(f"t{turn}") for make in draw(st.lists(st.sampled_from(BEFORE), max_size=3))),
        calls=tuple(CALLS[kind](f"<{turn}.{at}>", ids[at]) for at, kind in enumerate(kinds)),
        served=tuple(mcp_call("read", "{}", f"served {turn}") for _ in range(draw(st.integers(0, 1)))),
        outputs=tuple(OUTPUTS[kind](f"[{turn}.{at}]", ids[at]) for at, kind in enumerate(kinds)),
        order=tuple(draw(st.permutations(range(len(kinds))))),
    )
