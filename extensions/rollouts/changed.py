"""Outputs that did not reach the client as the model wrote them: which tokens of a turn did.

A stage of the operator's after ``generate`` may remove a text from what the client reads, and the file of the tokens
still has it.  The header of a recording names such stages.  Where there are some, the items of each turn are compared
with what came out after them, and from the first one on whose text was changed, dropped or added, all tokens count as
changed.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from penstock.extensions.rollouts.lines import STARTED, Unusable, lines_of
from penstock.pipeline.frames import CompactionOpened, ItemOpened
from penstock.pipeline.recordings.format import CHANGED_TURN, FILES, Header

GAP = 3
"""The most tokens of markup between two items."""

_SUMMARY = CompactionOpened.__name__
_OPENED = frozenset({_SUMMARY, *(kind.__name__ for kind in get_args(ItemOpened))})
_NAMES = ("name", "namespace", "server_label", "recipient")
"""The fields of the frames that open items with words of the model."""

_CITATION = re.compile("【[^】]*】")
"""A mark of the model's, in whose place the server writes a link."""


@dataclass
class _Item:
    kind: str
    names: tuple[str, ...]
    text: str = ""
    tokens: Sequence[int] = ()
    """Its tokens; empty if they are not known."""

    def is_in(self, later: _Item | None) -> bool:
        """Return True if a later item has its text, but for the links of citations."""
        if later is None:
            return False
        if later.kind == _SUMMARY:
            return later.text.strip() == self.text.strip()
        if later.names != self.names or later.text == self.text:
            return later.names == self.names
        parts = _CITATION.split(self.text)
        return len(parts) > 1 and bool(re.fullmatch(".*?".join(map(re.escape, parts)), later.text, re.DOTALL))


@dataclass
class _Turn:
    summarizes: bool
    items: list[_Item] = field(default_factory=list)
    count: int | None = None
    """The tokens that the parser has counted; None if the turn did not reach its end, or a text ended it."""


def counted_tokens(folder: Path) -> Mapping[int, int]:
    """Return the number of tokens that the server counts of each turn that ended, by its number."""
    ends = (line for line in lines_of(folder / FILES["parse"][0]) if line.kind == "TurnFinished")
    return {line.turn: line.frame["output_tokens"] for line in ends}


def unchanged_tokens(folder: Path, header: Header, outputs: Sequence[array[int]]) -> Sequence[int]:
    """Return the number of tokens before the first item that a stage has changed, for each turn; all if none has.

    Raise `Unusable` if the files are missing that say so.
    """
    stages = header.stages
    if not stages:
        return [len(output) for output in outputs]
    parsed = later = list(_turns(_needed(folder, FILES["parse"][0])))
    if "parse" in stages:
        conversed = FILES["converse"][0]
        is_kept = (folder / conversed).is_file() or not (folder / CHANGED_TURN).is_file()
        later = list(_turns(_needed(folder, conversed if is_kept else CHANGED_TURN)))
    shown = _shown(folder, stages)
    return [
        _unchanged(output, read, after, shown, is_strict="generate" in stages) if read and after else 0
        for output, read, after in zip_longest(outputs, parsed[: len(outputs)], later[: len(outputs)])
    ]


def _needed(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise Unusable(f"a stage of yours may have changed the output, and {name} is missing")
    return folder / name


def _unchanged(output: array[int], read: _Turn, after: _Turn, shown: Collection[str] | None, *, is_strict: bool) -> int:
    """Return how many tokens of a turn are unchanged; it is strict if a stage may have changed tokens."""
    kept, is_known = 0, True
    for item, later in zip_longest(read.items, _comparable(read, after)):
        if item is None or not item.is_in(later) or not (shown is None or item.text in shown):
            return kept
        place = _found(output, item.tokens, kept, GAP if is_known else len(output)) if item.tokens else -1
        is_known = place >= 0
        if is_known:
            kept = place + len(item.tokens)
        elif is_strict or item.tokens:
            return kept
    return kept if is_strict and read.count != len(output) else len(output)


def _comparable(read: _Turn, after: _Turn) -> Sequence[_Item]:
    """Return the later items: of what the model wrote for a summary, only that is among them."""
    return [*read.items[:-1], *after.items[-1:]] if read.summarizes else after.items


def _found(output: array[int], tokens: Sequence[int], start: int, gap: int) -> int:
    """Return the place of tokens in an output, at most ``gap`` tokens after ``start``; -1 if they are not there."""
    wanted = array(output.typecode, tokens)
    last = min(start + gap, len(output) - len(wanted))
    return next((at for at in range(start, last + 1) if output[at : at + len(wanted)] == wanted), -1)


def _turns(path: Path) -> Iterator[_Turn]:
    """Yield the turns of a file, with the items that the model wrote: those of programs and of the server are none."""
    turn: _Turn | None = None
    item: _Item | None = None
    for line in lines_of(path):
        frame, kind = line.frame, line.kind
        if kind == STARTED:
            if turn is not None:
                yield turn
            turn, item = _Turn(bool(frame["facts"].get("purpose", {}).get("summarizes"))), None
        elif turn is None:
            continue
        elif kind in _OPENED and not frame.get("caller"):
            item = _Item(kind, tuple(str(frame.get(name, "")) for name in _NAMES))
            turn.items.append(item)
        elif kind == "ItemDelta" and item is not None:
            item.text += frame["text"]
        elif kind == "ItemClosed" and item is not None:
            item.tokens, item = frame.get("token_ids", ()), None
        elif kind == "TurnFinished" and not isinstance(frame.get("stop_reason"), str):
            turn.count = frame["output_tokens"]
    if turn is not None:
        yield turn


def _shown(folder: Path, stages: Mapping[str, Any]) -> Collection[str] | None:
    """Return the texts that came out of the last stages; None if none of the operator's after ``converse`` matters."""
    events = folder / FILES["emit"][0]
    if stages.keys() & {"emit", "persist"}:
        sent, events = _needed(folder, FILES["persist"][0]), _needed(folder, events.name)
        if (deltas := _deltas(sent)) != _deltas(events):
            return _texts(sent) & frozenset(deltas.values())
    return _texts(_needed(folder, events.name)) if "converse" in stages else None


def _deltas(file: Path) -> Mapping[int, str]:
    """Return the texts of deltas, by the index of their item."""
    found = dict[int, str]()
    for line in lines_of(file):
        if line.kind.endswith(".delta") and isinstance(delta := (event := line.frame).get("delta"), str):
            found[event["output_index"]] = found.get(event["output_index"], "") + delta
    return found


def _texts(file: Path) -> frozenset[str]:
    """Return all texts of the items of a response."""
    done = (line.frame["item"] for line in lines_of(file) if line.kind == "response.output_item.done")
    return frozenset(text for item in done for text in _texts_in(item))


def _texts_in(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for part in value.values():
                yield from _texts_in(part)
        case list():
            for part in value:
                yield from _texts_in(part)
        case _:
            pass
