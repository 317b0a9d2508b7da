"""The data of a page: a flow as rows of tokens, items and events, in plain JSON.

References are indexes: a token refers to its chunk, a chunk to a frame of the engine, and an event to a frame of the
items.  Repeated data, such as the text of a token or the common fields of an item's deltas, is stored once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from penstock.api.cli.page.facts import facts_of, request_of
from penstock.api.cli.page.flow import Flow
from penstock.api.cli.page.tokens import Texts, Tokens, prompts_of, tokens_of
from penstock.pipeline.frames import (
    AnnotationAdded,
    CallFinished,
    CallStarted,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    McpListToolsOpened,
    Opened,
    ShellOutputOpened,
    TurnFinished,
)
from penstock.pipeline.recordings.token_places import Token, channel_of
from penstock.pipeline.secret import unwritten

Json = dict[str, Any]

OPENED = get_args(Opened)
SERVED = (McpListToolsOpened, ShellOutputOpened)
"""The frames that open an item which the server writes, not the model."""
VOLATILE = frozenset({"sequence_number", "delta", "logprobs", "obfuscation"})
"""The fields that differ between the deltas of one item."""
CLOSING = re.compile(rb"end|return|call|eot|eom|/", re.IGNORECASE)
"""Matches the special tokens that end an item."""


def layout_of(flow: Flow, name: str) -> Json:
    """Return all data of the page of a flow; ``name`` is the name of the recording."""
    texts = Texts()
    rows = _rows(flow)
    tokens = tokens_of(flow, texts)
    _share_out(rows, tokens, flow)
    return {
        "name": name,
        "facts": facts_of(flow),
        "request": request_of(flow),
        "notes": flow.notes,
        "failure": None if flow.failure is None else f"{flow.failure.error}: {flow.failure.message}",
        "rows": [row.told() for row in rows],
        "prompts": prompts_of(flow, texts),
        "tokens": tokens.told(),
        "frames": [[_kind(each.frame), each.cause, each.at] for each in flow.items],
        "events": _events(flow),
        "texts": texts.told,
    }


# Rows


@dataclass
class Row:
    """A row of the page: the beginning or the end of a turn, or an item, with its tokens and events."""

    kind: str
    turn: int
    title: str = ""
    channel: str = "markup"
    told_of: Json = field(default_factory=dict)
    deltas: list[tuple[int, str]] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    def told(self) -> Json:
        """Return the row as JSON for the page, without empty fields."""
        return {name: value for name, value in vars(self).items() if value}


def _rows(flow: Flow) -> list[Row]:
    """Return a row for each item, and for the beginning and end of each turn and of the response."""
    rows = [Row("start", 0)]
    turn, item = 0, None
    for index, crossing in enumerate(flow.items):
        frame = crossing.frame
        if isinstance(frame, GenerationStarted):
            turn += 1
            rows.append(Row("turn", turn, told_of={"prompt_tokens": frame.prompt_tokens}))
        elif isinstance(frame, OPENED):
            item = Row("item", turn, title_of(frame), channel_of(frame), {"opened": _plain(frame)})
            rows.append(item)
        elif isinstance(frame, TurnFinished):
            finished = _plain(frame)
            rows.append(Row("end", turn, told_of={"finished": finished}))
        if item:
            _add(item, index, frame)
        rows[-1].frames.append(index)
        item = None if isinstance(frame, ItemClosed) else item
    if not any(isinstance(crossing.frame, GenerationStarted) for crossing in flow.items):
        turns = sum(isinstance(crossing.frame, GenerationStarted) for crossing in flow.tokens)
        rows += [Row("turn", each + 1) for each in range(turns)]
    return [*rows, Row("last", turn)]


def _add(item: Row, index: int, frame: Any) -> None:
    details = item.told_of
    match frame:
        case ItemDelta():
            item.deltas.append((index, frame.text))
        case ItemClosed():
            details |= {"complete": frame.complete, "repairs": list(frame.repairs)}
        case AnnotationAdded():
            details.setdefault("annotations", []).append(frame.annotation)
        case CallStarted():
            details["started"] = index
        case CallFinished():
            data = frame.data and msgspec.to_builtins(frame.data)
            details |= {"finished": index, "result": frame.result, "error": frame.error, "data": data}
        case _:
            pass


def title_of(opened: Any) -> str:
    """Return the title of an item: its kind, and the tool, phase or recipient that it names."""
    fields = _plain(opened)
    kind = re.sub(r"(?<!^)(?=[A-Z])", " ", str(fields.pop("type")).removesuffix("Opened")).lower()
    whom = ".".join(str(fields[key]) for key in ("server_label", "namespace", "name") if fields.get(key))
    whom = whom or str(fields.get("phase") or fields.get("recipient") or "").replace("_", " ")
    return f"{kind} · {whom}" if whom else kind


def _share_out(rows: Sequence[Row], tokens: Tokens, flow: Flow) -> None:
    """Distribute the tokens and events to the rows."""
    row_of = {index: row for row in rows for index in row.frames}
    if flow.placed:
        _share_tokens(rows, tokens, flow)
    else:
        turns = [row for row in rows if row.kind == "turn"] or [rows[0]]
        for index, turn in enumerate(tokens.turns):
            turns[min(turn, len(turns)) - 1].tokens.append(index)
    for number, event in enumerate(flow.events):
        row = rows[0] if event.cause is None else row_of[event.cause]
        is_end = event.frame.__struct_config__.tag in ENDS and row.kind == "item"
        (rows[-1] if is_end else row).events.append(number)


ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


def _share_tokens(rows: Sequence[Row], tokens: Tokens, flow: Flow) -> None:
    """Assign each token, markup included, to the row of its item; in a turn without items, to the row of the turn."""
    written = _written(rows, flow)
    at, turn = 0, 0
    for index, token in enumerate(flow.placed):
        if tokens.turns[index] != turn:
            turn = tokens.turns[index]
            at = next((at for at, row in enumerate(written) if row.turn == turn), len(written))
        if token.item is not None and token.item < len(written):
            at = token.item
        else:
            while _has_next(written, at) and _is_behind(token, written[at], flow):
                at += 1
        row = written[at] if at < len(written) and written[at].turn == turn else _turn_row(rows, turn)
        row.tokens.append(index)


def _has_next(rows: Sequence[Row], at: int) -> bool:
    return at + 1 < len(rows) and rows[at].turn == rows[at + 1].turn


def _is_behind(token: Token, row: Row, flow: Flow) -> bool:
    """True if a token of markup comes after the end of an item.

    That is after the item's closing token, or at the token that begins the next item if the closing one is missing.
    """
    closed_by = flow.items[row.frames[-1]].cause
    if closed_by is None or token.frame < closed_by:
        return False
    if token.frame > closed_by:
        return True
    last = flow.placed[row.tokens[-1]] if row.tokens else None
    if last and last.frame == closed_by and last.is_mark and CLOSING.search(last.written):
        return True
    return token.is_mark and not CLOSING.search(token.written) and "missing end" in row.told_of.get("repairs", ())


def _written(rows: Sequence[Row], flow: Flow) -> list[Row]:
    """Return the rows of the items that the model wrote, in order."""
    items = [row for row in rows if row.kind == "item" and not isinstance(flow.items[row.frames[0]].frame, SERVED)]
    return [row for row in items if row.turn]


def _turn_row(rows: Sequence[Row], turn: int) -> Row:
    return next((row for row in rows if row.kind == "turn" and row.turn == turn), rows[0])


# Events


def _events(flow: Flow) -> Json:
    """Return each event as the index of its common fields in ``common``, followed by its own values."""
    common: list[Json] = []
    numbers: dict[bytes, int] = {}
    entries = []
    for crossing in flow.events:
        event = _plain(crossing.frame)
        rest = {name: value for name, value in event.items() if name not in VOLATILE} if "delta" in event else event
        key = msgspec.json.encode(rest)
        if key not in numbers:
            numbers[key] = len(common)
            common.append(rest)
        entries.append([numbers[key], event["sequence_number"], event.get("delta"), crossing.cause, crossing.at])
    return {"common": common, "told": entries}


def _plain(frame: Any) -> Json:
    plain: Json = msgspec.to_builtins(frame, enc_hook=unwritten)
    return plain


def _kind(frame: Any) -> str:
    return str(frame.__struct_config__.tag)
