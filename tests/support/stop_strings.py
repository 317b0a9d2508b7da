"""What stop strings have to do to a turn."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pipeline import frames
from tests.support.parsed_output import ParsedItem, parsed_items, turn_finished


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """``text`` before the first complete stop string, found by trying every position, and that stop string."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def cut_items(items: Sequence[ParsedItem], stops: tuple[str, ...]) -> list[tuple[str, str]]:
    """The items, up to the first message with a stop string, whose text ends before it."""
    cut: list[tuple[str, str]] = []
    for item in items:
        text, _ = cut_at_stop(item.text, stops) if item.kind == "Message" else (item.text, "")
        cut.append((item.kind, text))
        if text != item.text:
            break
    return cut


def check_turn(parsed: Sequence[frames.ParsedFrame], whole: Sequence[ParsedItem], stops: tuple[str, ...]) -> None:
    items, finished = parsed_items(parsed), turn_finished(parsed)
    assert [(item.kind, item.text) for item in items] == cut_items(whole, stops)
    is_stopped = any(isinstance(frame, frames.ItemClosed) and frame.stopped for frame in parsed)
    found = next(
        (stop for item in whole if item.kind == "Message" and (stop := cut_at_stop(item.text, stops)[1])), None
    )
    assert is_stopped == (found is not None)
    assert (finished.reason, finished.stop_reason) == ("stop" if is_stopped else "length", found)
