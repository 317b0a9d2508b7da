"""Choose the items to drop from a conversation that does not fit the context (``"truncation": "auto"``).

Whole items are dropped, oldest first.  Items that make no sense alone are dropped together: a call and its outputs,
and reasoning with the item that it led to.  Instructions stay, as do the user's last message and all items after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.pipeline.errors import ContextTooLong
from penstock.pipeline.protocol.items import CallItem, Compaction, Item, Message, Reasoning
from penstock.pipeline.protocol.pairs import callers_of


def to_drop(items: Sequence[Item], sizes: Sequence[int], excess: int) -> frozenset[int]:
    """Return the positions of the items to drop to save at least ``excess`` tokens, or of all that may be dropped.

    ``sizes`` are the numbers of tokens of the items.
    """
    dropped: set[int] = set()
    for group in _groups(items):
        if excess <= 0:
            break
        dropped.update(group)
        excess -= sum(sizes[at] for at in group)
    return frozenset(dropped)


COUNTED = 1_000_000
"""The most tokens to count of a prompt that does not fit: a longer one is refused before the rest is encoded."""


def refuse_excess(length: int, context_length: int) -> None:
    """Raise `ContextTooLong` for a prompt whose first ``length`` tokens are too many to go on."""
    if length > max(COUNTED, context_length):
        raise ContextTooLong(length, context_length, are_all=False)


def room_for_answer(max_tokens: int | None, context_length: int) -> int:
    """Return the number of tokens to leave for the answer when items are dropped.

    ``max_tokens`` is the request's limit on output tokens, if it has one.
    """
    return context_length // 16 if max_tokens is None else min(max_tokens, context_length // 2)


def _groups(items: Sequence[Item]) -> list[list[int]]:
    """Return the positions of the items that may be dropped, in groups that go together, oldest first."""
    leader = _leaders(items)
    groups: Mapping[int, list[int]] = defaultdict(list)
    for at in range(len(items)):
        groups[leader[at]].append(at)
    positions = (at for at in reversed(range(len(items))) if _role(items[at]) == "user")
    last_user_position = next(positions, len(items) - 1)
    return [
        group
        for group in groups.values()
        if group[-1] < last_user_position and not any(_role(items[at]) in {"system", "developer"} for at in group)
    ]


def _leaders(items: Sequence[Item]) -> list[int]:
    """Return, for each item, the position of the item that it goes with; its own if it goes with none.

    An output goes with its call, and reasoning goes with the item that it led to.
    """
    callers = callers_of(items)
    leaders = [callers.get(at, at) for at in range(len(items))]
    for at in reversed(range(len(items) - 1)):
        if isinstance(items[at], Reasoning) and _is_led_to(items[at + 1]):
            leaders[at] = leaders[at + 1]
    return leaders


def _is_led_to(item: Item) -> bool:
    return isinstance(item, Reasoning | CallItem) or _role(item) == "assistant"


def _role(item: Item) -> str | None:
    if isinstance(item, Compaction):
        return "developer"  # it stays: it stands for all that came before
    return item.role if isinstance(item, Message) else None
