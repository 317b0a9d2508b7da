"""Outputs that did not reach the client as the model wrote them: which tokens of a turn did."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.extensions.rollouts.lines import Unusable, lines_of
from penstock.pipeline.recordings.format import FILES

_TEXTS = frozenset({"MessageOpened", "ReasoningOpened", "RefusalOpened"})
"""The frames that open an item whose text the client sees as it is."""


def counted_tokens(folder: Path) -> Mapping[int, int]:
    """Return the number of tokens that the server counts of each turn that ended, by its number."""
    ends = (line for line in lines_of(folder / FILES["parse"][0]) if line.kind == "TurnFinished")
    return {line.turn: line.frame["output_tokens"] for line in ends}


def kept_tokens(folder: Path, outputs: Sequence[array[int]]) -> Mapping[int, int]:
    """Return the number of tokens before the first item that a stage has changed, of each turn that has one.

    An item is unchanged if the client got its text, or if the last stages still knew its tokens.  Raise `Unusable` if
    the files are missing that say so.
    """
    for name, _ in (FILES["parse"], FILES["emit"]):
        if not (folder / name).is_file():
            raise Unusable(f"a stage of yours may have changed the output, and {name} is missing")
    kept, shown = dict[int, int](), _Shown(folder)
    ends = dict.fromkeys(range(1, len(outputs) + 1), 0)
    for number, kind, text, tokens in _items(folder):
        output = outputs[number - 1] if number <= len(outputs) else array("I")
        end = ends.get(number, 0)
        is_there = not tokens or output[end : end + len(tokens)] == array("I", tokens)
        if not is_there or not shown.has(kind, text, tokens):
            kept.setdefault(number, end)
        ends[number] = end + len(tokens)
    return kept


def _items(folder: Path) -> Iterator[tuple[int, str, str, tuple[int, ...]]]:
    """Yield the number of its turn, the frame that opened it, the text and the tokens of each item of the model."""
    kind, texts = "", list[str]()
    for line in lines_of(folder / FILES["parse"][0]):
        match line.kind:
            case "ItemDelta":
                texts.append(line.frame["text"])
            case "ItemClosed":
                yield line.turn, kind, "".join(texts), tuple(line.frame.get("token_ids", ()))
            case opened if opened.endswith("Opened"):
                kind, texts = opened, []
            case _:
                pass


class _Shown:
    """What came out of the last stages of a response."""

    def __init__(self, folder: Path) -> None:
        events, sent = (folder / FILES[stage][0] for stage in ("emit", "persist"))
        self._is_changed = sent.is_file()
        lines = lines_of(sent if self._is_changed else events)
        done = (line.frame["item"] for line in lines if line.kind == "response.output_item.done")
        self._texts = {text for item in done for text in _texts_in(item)}
        known = (line.frame for line in lines_of(events) if line.kind == "ItemTokens")
        self._tokens = {tuple(frame["token_ids"]) for frame in known}

    def has(self, kind: str, text: str, tokens: tuple[int, ...]) -> bool:
        """Return True if an item came out as the model wrote it."""
        if text in self._texts or not text:
            return True
        is_text = kind in _TEXTS and self._is_changed
        return not is_text and bool(tokens) and tokens in self._tokens


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
