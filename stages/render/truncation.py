"""Which items of a conversation to drop when it does not fit.

Whole items go, oldest first.  What makes no sense alone goes together: a call and its outputs, and reasoning with the
item that it led to.  Instructions stay, and so does the last thing that the user said with all that came behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.pipeline.protocol.items import Item, Message, Reasoning
from penstock.stages.models.call_pairs import AnyCall, callers_of


def to_drop(items: Sequence[Item], sizes: Sequence[int], excess: int) -> frozenset[int]:
    """The positions of the items to drop so that at least ``excess`` tokens go, or all that may.

    ``sizes`` are the tokens of each item.
    """
    dropped: set[int] = set()
    for group in _groups(items):
        if excess <= 0:
            break
        dropped.update(group)
        excess -= sum(sizes[at] for at in group)
    return frozenset(dropped)


def room_for_answer(asked: int | None, context_length: int) -> int:
    """Tokens to leave for the answer, where there is anything to drop for them; ``asked`` is how long it may be."""
    return context_length // 16 if asked is None else min(asked, context_length // 2)


def _groups(items: Sequence[Item]) -> list[list[int]]:
    """The positions of what may be dropped, in groups that go together, oldest first."""
    leader = _leaders(items)
    groups: Mapping[int, list[int]] = defaultdict(list)
    for at in range(len(items)):
        groups[leader[at]].append(at)
    said = _last_said(items)
    return [group for group in groups.values() if group[-1] < said and not any(_is_told(items[at]) for at in group)]


def _leaders(items: Sequence[Item]) -> list[int]:
    """For each item the one that it goes with: outputs with their call, reasoning with what it led to."""
    callers = callers_of(items)
    leaders = [callers.get(at, at) for at in range(len(items))]
    for at in reversed(range(len(items) - 1)):
        if isinstance(items[at], Reasoning) and _is_led_to(items[at + 1]):
            leaders[at] = leaders[at + 1]
    return leaders


def _is_led_to(item: Item) -> bool:
    return isinstance(item, Reasoning | AnyCall) or (isinstance(item, Message) and item.role == "assistant")


def _is_told(item: Item) -> bool:
    return isinstance(item, Message) and item.role in {"system", "developer"}


def _last_said(items: Sequence[Item]) -> int:
    """The position of the user's last message; of the last item where there is none."""
    said = (at for at in reversed(range(len(items))) if _is_user(items[at]))
    return next(said, len(items) - 1)


def _is_user(item: Item) -> bool:
    return isinstance(item, Message) and item.role == "user"
