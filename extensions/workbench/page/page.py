"""The data of a page: a timeline as rows of tokens, items and events, in plain JSON.

References are indexes: a token refers to its chunk, a chunk to a frame of the engine, and an event to a frame of the
items.  Repeated data, such as the text of a token or the common fields of an item's deltas, is stored once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import msgspec

from penstock.api.http.web_page import WebPage
from penstock.extensions.workbench.page.tokens import Texts, prompts_of, tokens_of
from penstock.extensions.workbench.timeline.facts import DETAILS, facts_of, request_of, title_of
from penstock.extensions.workbench.timeline.rows import Row, rows_of
from penstock.extensions.workbench.timeline.timeline import Timeline
from penstock.pipeline import frames
from penstock.pipeline.secret import unwritten

Json = dict[str, Any]

_ABSOLUTE = re.compile(r"(?<![\w./~-])/[^\s:'\",;()/]+(?:/[^\s:'\",;()/]+)+")
"""Matches an absolute path of at least two names."""

VOLATILE = frozenset({"sequence_number", "delta", "logprobs", "obfuscation"})
"""The fields that differ between the deltas of one item."""


def layout_of(timeline: Timeline, name: str) -> Json:
    """Return all data of the page of a timeline; ``name`` is the name of the recording."""
    texts, facts = Texts(), facts_of(timeline)
    return {
        "name": title_of(timeline, name),
        "facts": [(name, without_folders(value)) for name, value in facts if name not in DETAILS],
        "details": [(name, without_folders(value)) for name, value in facts if name in DETAILS],
        "request": request_of(timeline),
        "notes": [_sentence(note) for note in (*timeline.notes, timeline.difference) if note],
        "failures": [_sentence(failure) for failure in timeline.failures],
        "rows": [_row(row, timeline) for row in rows_of(timeline)],
        "tokens": tokens_of(timeline, texts),
        "fault": timeline.at_fault,
        "prompts": prompts_of(timeline, texts),
        "frames": [[_plain(each.frame)["type"], each.cause, each.at] for each in timeline.items],
        "events": _events(timeline),
        "texts": texts.entries,
    }


def _sentence(text: str) -> str:
    text = without_folders(text)
    return f"{text[0].upper()}{text[1:]}."


def without_folders(text: str) -> str:
    """Shorten the absolute paths in a text, as a page is sent to others: relative to this one, or the last name."""
    return _ABSOLUTE.sub(lambda found: _below(PurePath(found[0])), text)


def _below(path: PurePath) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _row(row: Row, timeline: Timeline) -> Json:
    shown = {**vars(row), "title": row.title, "opened": row.opened and _plain(row.opened)}
    details: Json = {"kind": row.kind, "turn": row.turn, "channel": row.channel}
    for index in row.frames:
        match timeline.items[index].frame:
            case frames.GenerationStarted(prompt_tokens=count):
                details["prompt_tokens"] = count
            case frames.ItemDelta(text):
                details.setdefault("deltas", []).append((index, text))
            case frames.ItemClosed(complete=complete, repairs=repairs):
                details |= {"complete": complete, "repairs": repairs}
            case frames.CallStarted():
                details["started"] = index
            case frames.CallFinished(result, error, data):
                details |= {
                    "finished": index,
                    "result": result,
                    "error": error,
                    "data": data and msgspec.to_builtins(data),
                }
            case frames.TurnFinished() as ended:
                details["ended"] = _plain(ended)
            case _:
                pass
    return {name: value for name, value in shown.items() if value} | details


def _events(timeline: Timeline) -> Json:
    """Return each event as the index of its common fields in ``common``, followed by its own values."""
    common: list[Json] = []
    numbers: dict[bytes, int] = {}
    entries = []
    for crossing in timeline.events:
        event = _plain(crossing.frame)
        rest = {name: value for name, value in event.items() if name not in VOLATILE} if "delta" in event else event
        key = msgspec.json.encode(rest)
        if key not in numbers:
            numbers[key] = len(common)
            common.append(rest)
        entries.append([numbers[key], event["sequence_number"], event.get("delta"), crossing.cause, crossing.at])
    return {"common": common, "entries": entries}


def _plain(frame: Any) -> Json:
    plain: Json = msgspec.to_builtins(frame, enc_hook=unwritten)
    return plain


_PACKAGE = "penstock.extensions.workbench.page"

DATA = (_PACKAGE, "layout.js")
"""The part of a script that reads the data of a page that is a file."""

SELECTION = (_PACKAGE, "selected.css")
"""The part of a style that has the selected token at the end of the page."""

SCRIPTS = ("causes.js", "rows.js", "timeline.js", "chosen.js", "keys.js", "page.js")
"""The parts of the script, in order: first the data, then drawing and interaction."""

PAGE = WebPage(
    body=(_PACKAGE, "page.html"),
    styles=(SELECTION, (_PACKAGE, "page.css")),
    scripts=[DATA, *((_PACKAGE, script) for script in SCRIPTS)],
)


def page_of(layout: Mapping[str, Any]) -> str:
    """Return the HTML of the page."""
    return PAGE.html_of(layout, str(layout["name"]))
