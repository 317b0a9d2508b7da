"""Cuts: why a prompt does not extend the turn that it continues.

The items of both turns tell, which are only read here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from penstock.extensions.rollouts.lines import STARTED, lines_of
from penstock.extensions.rollouts.paths import Cut, CutReason, PathTurn
from penstock.extensions.rollouts.prefixes import common
from penstock.extensions.rollouts.reading import RecordedTurn, text_of
from penstock.pipeline.recordings.format import FILES, UnreadableRecording, read_header
from penstock.pipeline.recordings.response_folder import RESPONSE
from penstock.stages.models.harmony.vocabulary import MESSAGE, START

ANALYSIS = 35644
"""The token of Harmony that names the channel of thoughts."""

_OPENERS = 8
"""The most tokens at the end of a prompt with which a template begins the output, such as the mark of a thought."""

_MESSAGE = "message of "

_Content: TypeAlias = tuple[Any, ...]


class _Request(msgspec.Struct, frozen=True):
    """The request of a turn, as far as it decides on the prompt."""

    class Response(msgspec.Struct, frozen=True):
        instructions: Any = None
        tools: Any = None
        truncation: str = ""
        reasoning: Any = None
        text: Any = None
        previous_response_id: str | None = None
        conversation: Any = None

    class Facts(msgspec.Struct, frozen=True):
        class Purpose(msgspec.Struct, frozen=True):
            summarizes: bool = False

        response: _Request.Response
        input: tuple[dict[str, Any], ...] = ()
        date: str = ""
        template: Any = None
        tools: Any = None
        purpose: Purpose = Purpose()

    facts: Facts
    history: tuple[dict[str, Any], ...] = ()

    @property
    def is_sent_whole(self) -> bool:
        """True if its client has sent all items, and so may have changed some."""
        return not (self.facts.response.previous_response_id or self.facts.response.conversation)

    @property
    def head(self) -> tuple[Any, ...]:
        """The parts of a prompt before all items."""
        facts, response = self.facts, self.facts.response
        given = takewhile(lambda item: item.get("role") in ("system", "developer"), (*self.history, *facts.input))
        texts = [_content(item) for item in given]
        return (
            response.instructions,
            response.tools,
            response.reasoning,
            response.text,
            facts.date,
            facts.tools,
            texts,
        )


class Place(msgspec.Struct, frozen=True):
    """The place of a turn that another continues, on its path."""

    tokens: array[int]
    """Its prompt and its output."""
    turns: Sequence[PathTurn]
    """The turns of the path up to it."""
    folders: Sequence[Path]
    """The recordings of these."""

    @property
    def turn(self) -> PathTurn:
        """The turn itself."""
        return self.turns[-1]

    @property
    def folder(self) -> Path:
        """Its recording."""
        return self.folders[-1]

    @property
    def written(self) -> Iterator[tuple[PathTurn, Path]]:
        """The turns with their recordings."""
        return zip(self.turns, self.folders, strict=True)


def cut_of(was: Place, now: RecordedTurn) -> Cut:
    """Return the place at which the prompt of a turn leaves the prompt and the output of an earlier one."""
    at = common(was.tokens, now.prompt)
    try:
        reason = _reason(was, now, at)
    except (UnreadableRecording, msgspec.MsgspecError, OSError):
        reason = "unknown"
    return Cut(
        was.turn.response,
        was.turn.number,
        reason=reason,
        at=at,
        was=was.tokens[at] if at < len(was.tokens) else None,
        read=now.prompt[at] if at < len(now.prompt) else None,
    )


def _reason(was: Place, now: RecordedTurn, at: int) -> CutReason:
    before, after = _request(was.folder, was.turn.number), _request(now.folder, now.number)
    ours = [*before.history, *_first_input(was, before), *_output(was)]
    theirs = [*after.history, *after.facts.input]
    if now.summarizes or before.facts.purpose.summarizes or _compactions(theirs) - _compactions(ours):
        return "compaction"
    if at < was.turns[0].begin and before.head != after.head:
        return "instructions"
    is_new = was.turn.response != now.response and after.is_sent_whole
    is_edited = is_new and _contents(theirs)[: len(own := _contents(ours))] != own
    writer = next((each for each in was.written if each[0].begin - _OPENERS <= at < each[0].end), None)
    is_written = writer is not None and writer[0].begin <= at
    if is_written or not is_edited:
        is_left_out = _is_left_out(was, writer, at, now)
        if is_left_out is not None:
            return "thoughts" if is_left_out else "template"
    if is_edited:
        return "edit"
    return "truncation" if not is_written and after.facts.response.truncation == "auto" else "template"


def _request(folder: Path, number: int) -> _Request:
    """Return the request of a turn, with the history of its response if that was recorded."""
    started = (line for line in lines_of(folder / FILES["generate"][0]) if line.kind == STARTED)
    request = next(msgspec.convert(line.frame, _Request) for line in started if line.turn == number)
    resolved = next((line.frame for line in lines_of(folder / FILES["normalize"][0])), {})
    return msgspec.structs.replace(request, history=tuple(resolved.get("history", ())))


def _first_input(was: Place, request: _Request) -> Sequence[dict[str, Any]]:
    """Return the items that the client sent: those of later turns are among the output of the response."""
    return request.facts.input if was.turn.number == 1 else _request(was.folder, 1).facts.input


def _output(was: Place) -> Sequence[dict[str, Any]]:
    path = was.folder / RESPONSE
    return msgspec.json.decode(path.read_bytes()).get("output", ()) if path.is_file() else ()


def _compactions(items: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str(item.get("encrypted_content")) for item in items if item.get("type") == "compaction"}


def _contents(items: Sequence[Mapping[str, Any]]) -> list[_Content]:
    """Return what items say, without thoughts; texts of one role are one, as in dialects that have no items."""
    said = [_content(item) for item in items if item.get("type") != "reasoning"]
    runs = [(speaker, list(run)) for speaker, run in groupby(said, key=itemgetter(0))]
    return [
        each
        for speaker, run in runs
        for each in ([(speaker, "".join(text for _, text in run))] if speaker.startswith(_MESSAGE) else run)
    ]


def _content(item: Mapping[str, Any]) -> _Content:
    """Return what an item says: its ids, and the spelling of JSON in it, do not count."""
    kind = str(item.get("type", "message"))
    if kind == "message":
        return f"{_MESSAGE}{item.get('role')}", "".join(text_of(item.get("content")).split())
    if kind.endswith("_output"):
        return kind, text_of(item.get("output"))
    said = {name: _value(item[name]) for name in ("name", "arguments", "input", "action", "code") if name in item}
    return kind, said


def _value(said: Any) -> Any:
    try:
        return msgspec.json.decode(said) if isinstance(said, str) else said
    except msgspec.DecodeError:
        return said


def _is_left_out(was: Place, writer: tuple[PathTurn, Path] | None, at: int, now: RecordedTurn) -> bool | None:
    """Return if the thought that a token belongs to is left out, or None if the token belongs to none."""
    if read_header(was.folder / FILES["generate"][0]).encoding == "harmony":
        return _is_harmony_left_out(was.tokens, at)
    if writer is None:  # what it read has another turn's thought if it stands after the mark of one of its own
        marks = {was.tokens[begin] for each in was.written for is_thought, begin, _ in _items(*each) if is_thought}
        return True if at < len(was.tokens) and was.tokens[at] in marks else None
    at = max(at, writer[0].begin)
    for is_thought, begin, end in _items(*writer):
        if begin <= at < end:
            following = was.tokens[end : end + _OPENERS]
            return (at == begin or now.prompt[at : at + len(following)] == following) if is_thought else None
    return None


def _is_harmony_left_out(tokens: array[int], at: int) -> bool | None:
    """Return the same for Harmony: what stands in place of a thought differs from it in its header."""
    start = next((place for place in range(min(at, len(tokens) - 1), 0, -1) if tokens[place] == START), 0)
    try:
        message = tokens.index(MESSAGE, start)
    except ValueError:
        return None
    return at <= message if ANALYSIS in tokens[start:message] else None


def _items(writer: PathTurn, folder: Path) -> Iterator[tuple[bool, int, int]]:
    """Yield for each item of a turn if it is a thought, and the places of its tokens."""
    begin, is_thought = writer.begin, False
    for line in lines_of(folder / FILES["parse"][0]):
        if line.turn == writer.number and line.kind.endswith("Opened"):
            is_thought = line.kind == "ReasoningOpened"
        elif line.turn == writer.number and line.kind == "ItemClosed":
            end = begin + len(line.frame.get("token_ids", ()))
            yield is_thought, begin, end
            begin = end
