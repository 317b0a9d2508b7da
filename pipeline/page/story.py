"""The story that a page tells: a flow, laid out in rows from tokens over items to events, as plain JSON.

Numbers refer: a token to its chunk, a chunk to a frame of the engine, an event to a frame of the items.  What repeats,
as how a token is written or what the deltas of an item have in common, is told once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from pipeline.commands.places import Token, channel_of
from pipeline.commands.story import Crossing
from pipeline.frames import (
    AnnotationAdded,
    CallFinished,
    CallStarted,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    McpListToolsOpened,
    Opened,
    ShellOutputOpened,
    TokenChunk,
    TurnFinished,
)
from pipeline.page.facts import facts_of, request_of
from pipeline.page.flow import Flow
from pipeline.secret import unwritten

Json = dict[str, Any]

OPENED = get_args(Opened)
SERVED = (McpListToolsOpened, ShellOutputOpened)
"""What the model does not write."""
VOLATILE = frozenset({"sequence_number", "delta", "logprobs", "obfuscation"})
"""What distinguishes the deltas of one item."""
PART_OF_A_CHARACTER = ""
"""How a token is shown whose bytes only another one completes."""
CHANNELS = ("markup", "analysis", "commentary", "final", "call", "unread")
CLOSING = re.compile(rb"end|return|call|eot|eom|/", re.IGNORECASE)
"""In the marks that end an item."""


def story_of(flow: Flow, name: str) -> Json:
    """All that the page shows of a flow; ``name`` is what the recording is called."""
    texts = _Texts()
    rows = _rows(flow)
    tokens = _tokens(flow, texts)
    _share_out(rows, tokens, flow)
    return {
        "name": name,
        "facts": facts_of(flow),
        "request": request_of(flow),
        "notes": flow.notes,
        "failure": None if flow.failure is None else f"{flow.failure.error}: {flow.failure.message}",
        "rows": [row.told() for row in rows],
        "prompts": _prompts(flow, texts),
        "tokens": tokens.told(),
        "frames": [[_kind(each.frame), each.cause, each.at] for each in flow.items],
        "events": _events(flow),
        "texts": texts.told,
    }


# Rows


@dataclass
class Row:
    """What belongs together: the beginning or the end of a turn, or an item with its tokens and its events."""

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
        """The row as the page reads it."""
        return {name: value for name, value in vars(self).items() if value}


def _rows(flow: Flow) -> list[Row]:
    """One row for each item, and one for each beginning and end; at least one."""
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
        rows += [Row("turn", turn + 1) for turn in range(len(_started(flow.tokens)))]
    return [*rows, Row("last", turn)]


def _add(item: Row, index: int, frame: Any) -> None:
    told = item.told_of
    match frame:
        case ItemDelta():
            item.deltas.append((index, frame.text))
        case ItemClosed():
            told |= {"complete": frame.complete, "repairs": list(frame.repairs)}
        case AnnotationAdded():
            told.setdefault("annotations", []).append(frame.annotation)
        case CallStarted():
            told["started"] = index
        case CallFinished():
            told |= {"finished": index, "result": frame.result, "error": frame.error, "data": list(frame.data)}
        case _:
            pass


def title_of(opened: Any) -> str:
    """What an item is called: its kind, and whom it names."""
    told = _plain(opened)
    kind = re.sub(r"(?<!^)(?=[A-Z])", " ", str(told.pop("type")).removesuffix("Opened")).lower()
    whom = ".".join(str(told[key]) for key in ("server_label", "namespace", "name") if told.get(key))
    whom = whom or str(told.get("phase") or told.get("recipient") or "").replace("_", " ")
    return f"{kind} · {whom}" if whom else kind


def _share_out(rows: Sequence[Row], tokens: _Tokens, flow: Flow) -> None:
    """Give each row its tokens and its events."""
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


def _share_tokens(rows: Sequence[Row], tokens: _Tokens, flow: Flow) -> None:
    """Give each token to the item that it is a part of, markup included; in a turn without items, to the turn."""
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
    """Whether a token of markup comes behind the item, which another one has closed, or it itself by beginning anew."""
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
    """The rows of the items that the model wrote, in the order in which it did."""
    items = [row for row in rows if row.kind == "item" and not isinstance(flow.items[row.frames[0]].frame, SERVED)]
    return [row for row in items if row.turn]


def _turn_row(rows: Sequence[Row], turn: int) -> Row:
    return next((row for row in rows if row.kind == "turn" and row.turn == turn), rows[0])


# Tokens


@dataclass
class _Texts:
    """Each way in which a token is written, once: its id, its text, and its bytes where the text does not tell them."""

    told: list[list[Any]] = field(default_factory=list)
    numbers: dict[tuple[int, str | None], int] = field(default_factory=dict)

    def number(self, token: int, written: bytes | None, text: str | None, is_mark: bool) -> int:
        """The number of a token that is shown as ``text``."""
        if (token, text) not in self.numbers:
            self.numbers[token, text] = len(self.told)
            self.told.append([token, text, None if written is None else written.hex(" "), int(is_mark)])
        return self.numbers[token, text]


@dataclass
class _Tokens:
    texts: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    repairs: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)

    def told(self) -> Json:
        """The tokens as the page reads them: the channel of each is one digit."""
        told = {name: value for name, value in vars(self).items() if name not in ("channels", "turns")}
        return {**told, "channels": "".join(str(CHANNELS.index(channel)) for channel in self.channels)}


def _tokens(flow: Flow, texts: _Texts) -> _Tokens:
    told = _Tokens()
    spelling = flow.model.spelling
    ids = [token for crossing in flow.tokens for token in _ids(crossing.frame)]
    placed: Sequence[Token | None] = flow.placed or [None] * len(ids)
    shown = _shown([None if token is None else (token.written, token.is_mark) for token in placed])
    for turn, index, crossing in _chunks(flow.tokens):
        if crossing.at is not None:
            told.times[index] = crossing.at
        for position, token in enumerate(crossing.frame.token_ids):
            number = len(told.texts)
            place = placed[number]
            written, is_mark = (place.written, place.is_mark) if place else (None, False)
            told.texts.append(texts.number(token, written, shown[number], is_mark))
            told.chunks.append(index)
            told.turns.append(turn)
            told.channels.append(place.channel if place else "unread")
            if place and place.repairs:
                told.repairs[number] = list(place.repairs)
            if crossing.frame.logprobs and spelling:
                told.logprobs[number] = _logprobs(crossing.frame.logprobs[position], spelling)
    return told


def _chunks(tokens: Sequence[Crossing]) -> Iterable[tuple[int, int, Crossing]]:
    turn = 0
    for index, crossing in enumerate(tokens):
        turn += isinstance(crossing.frame, GenerationStarted)
        if isinstance(crossing.frame, TokenChunk):
            yield turn, index, crossing


def _ids(frame: Any) -> tuple[int, ...]:
    return frame.token_ids if isinstance(frame, TokenChunk) else ()


def _started(tokens: Sequence[Crossing]) -> list[Crossing]:
    return [crossing for crossing in tokens if isinstance(crossing.frame, GenerationStarted)]


def _logprobs(logprob: Any, spelling: Any) -> list[Any]:
    return [logprob.logprob, [[spelling(token).decode(errors="replace"), value] for token, value in logprob.top]]


def _shown(written: Sequence[tuple[bytes, bool] | None]) -> list[str | None]:
    """The text of each token; of several that make up one character, the last one has it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str | None] = []
    for each in written:
        if each is None:
            texts.append(None)
        elif each[1]:
            texts.append(each[0].decode(errors="replace"))
            decoder.reset()
        else:
            texts.append(decoder.decode(each[0]) or PART_OF_A_CHARACTER)
    return texts


def _prompts(flow: Flow, texts: _Texts) -> list[Json]:
    """The prompt of each turn, message by message; ``known`` of them the turn before had as well."""
    told: list[Json] = []
    before: list[list[int]] = []
    for prompt in flow.prompts:
        messages = _messages(prompt.token_ids, flow, texts)
        known = 0
        while known < min(len(before), len(messages)) and before[known] == messages[known]:
            known += 1
        told.append({"messages": messages, "known": known, "count": len(prompt.token_ids), "grammar": prompt.grammar})
        before = messages
    return told


def _messages(token_ids: Sequence[int], flow: Flow, texts: _Texts) -> list[list[int]]:
    """The tokens of each message of a prompt: one begins with the first mark that comes more than once."""
    spelling, is_mark = flow.model.spelling, flow.model.is_mark
    if spelling is None:
        return [[texts.number(token, None, None, is_mark=False) for token in token_ids]]
    written = [(spelling(token), is_mark(token)) for token in token_ids]
    shown = _shown(written)
    marks = [token for token, (_, mark) in zip(token_ids, written, strict=True) if mark]
    first = next((mark for mark in marks if marks.count(mark) > 1), None)
    messages: list[list[int]] = [[]]
    for token, (spelled, mark), text in zip(token_ids, written, shown, strict=True):
        if token == first and messages[-1]:
            messages.append([])
        messages[-1].append(texts.number(token, spelled, text, mark))
    return messages


# Events


def _events(flow: Flow) -> Json:
    """Each event as the number of what it has in common with others, and what is its own."""
    common: list[Json] = []
    numbers: dict[bytes, int] = {}
    told = []
    for crossing in flow.events:
        event = _plain(crossing.frame)
        rest = {name: value for name, value in event.items() if name not in VOLATILE} if "delta" in event else event
        key = msgspec.json.encode(rest)
        if key not in numbers:
            numbers[key] = len(common)
            common.append(rest)
        told.append([numbers[key], event["sequence_number"], event.get("delta"), crossing.cause, crossing.at])
    return {"common": common, "told": told}


def _plain(frame: Any) -> Json:
    plain: Json = msgspec.to_builtins(frame, enc_hook=unwritten)
    return plain


def _kind(frame: Any) -> str:
    return str(frame.__struct_config__.tag)
