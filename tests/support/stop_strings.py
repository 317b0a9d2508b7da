"""What stop strings have to do to a turn."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pipeline import frames
from tests.support.parsed_output import ParsedItem, parsed_items, turn_finished


def before_stop(text: str, stops: tuple[str, ...]) -> str:
    """``text`` before the first complete stop string, found by trying every position."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


def cut_items(items: Sequence[ParsedItem], stops: tuple[str, ...]) -> list[tuple[str, str]]:
    """The items, up to the first message with a stop string, whose text ends before it."""
    cut: list[tuple[str, str]] = []
    for item in items:
        text = before_stop(item.text, stops) if item.kind == "Message" else item.text
        cut.append((item.kind, text))
        if text != item.text:
            break
    return cut


def check_turn(parsed: Sequence[frames.ParsedFrame], whole: Sequence[ParsedItem], stops: tuple[str, ...]) -> None:
    items, finished = parsed_items(parsed), turn_finished(parsed)
    assert [(item.kind, item.text) for item in items] == cut_items(whole, stops)
    is_stopped = any(isinstance(frame, frames.ItemClosed) and frame.stopped for frame in parsed)
    assert is_stopped == any(item.kind == "Message" and any(stop in item.text for stop in stops) for item in whole)
    assert finished.reason == ("stop" if is_stopped else "length")
