"""The turns of recordings: what a model read and wrote, token by token, without the items that the tokens came from."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from penstock.extensions.rollouts.changed import counted_tokens, unchanged_tokens
from penstock.extensions.rollouts.lines import MARKED, STARTED, Unusable, lines_of, upgraded
from penstock.extensions.rollouts.paths import NO_LOGPROB
from penstock.extensions.workbench.forced import recorded
from penstock.pipeline.frames import Sampling
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.protocol.history import opening
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.recordings import older
from penstock.pipeline.recordings.format import FILES, Header, UnreadableRecording, header_of, read_header
from penstock.pipeline.recordings.wire import WIRE
from penstock.services.engines.weights import spans

TOKENS, PROMPTS = FILES["generate"][0], FILES["render"][0]

_NAMES = frozenset({WIRE, *(name for name, _ in FILES.values())})

UINT32 = "I"
"""The type code of arrays of tokens."""


class _Response(msgspec.Struct, frozen=True):
    class Conversation(msgspec.Struct, frozen=True):
        id: str = ""

    id: str = ""
    created_at: float = 0.0
    previous_response_id: str | None = None
    conversation: Conversation | None = None


class _Origin(msgspec.Struct, frozen=True):
    position: int = 0
    opening: str = ""
    key: str = ""
    session: str = ""


class _Purpose(msgspec.Struct, frozen=True):
    generates: bool = True
    summarizes: bool = False


class _Item(msgspec.Struct, frozen=True):
    """The parts of an item that show its place in a conversation, and the output of a call."""

    class Caller(msgspec.Struct, frozen=True):
        caller_id: str | None = None

    type: str = ""
    role: str = ""
    id: str = ""
    call_id: str = ""
    caller: Caller | None = None
    output: msgspec.Raw | UnsetType = UNSET
    result: msgspec.Raw | UnsetType = UNSET

    @property
    def is_of_program(self) -> bool:
        """True for a call of a program, whose result the model does not read."""
        return self.caller is not None and bool(self.caller.caller_id)

    @property
    def is_given(self) -> bool:
        """True for a message of the client."""
        return self.type == "message" and self.role != "assistant"

    def is_made_by(self, response: str) -> bool:
        """True if a response has made it."""
        own = _OWN_ID.fullmatch(self.id)
        return own is not None and response == f"resp_{own[1]}"

    @property
    def response(self) -> str:
        """The id of the response that has made it, as far as it has an id of this server."""
        own = _OWN_ID.fullmatch(self.call_id) or _OWN_ID.fullmatch(self.id)
        return f"resp_{own[1]}" if own else ""


class _Facts(msgspec.Struct, frozen=True):
    response: _Response
    input: tuple[msgspec.Raw, ...] = ()
    sampling: Mapping[str, Any] = {}
    origin: _Origin = _Origin()
    purpose: _Purpose = _Purpose()
    results: Mapping[str, str] = {}

    @property
    def items(self) -> tuple[_Item, ...]:
        """The items that came with the request, and after a turn with calls of the server those of that turn."""
        return tuple(map(_decode_item, self.input))


class _Prompt(msgspec.Struct, frozen=True, tag="Prompt"):
    token_ids: tuple[int, ...]
    images: tuple[msgspec.Raw, ...] = ()
    at: float | None = None


class _Started(msgspec.Struct, frozen=True, tag="GenerationStarted"):
    facts: _Facts
    prompt_tokens: int
    held_to_grammar: bool = False
    prompt: tuple[int, ...] = ()
    at: float = 0.0


class _Begun(msgspec.Struct, frozen=True, tag="GenerationStarted"):
    facts: _Facts


class _Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float


class _Chunk(msgspec.Struct, frozen=True, tag="TokenChunk", gc=False):
    token_ids: tuple[int, ...]
    logprobs: tuple[_Logprob, ...] = ()

    @property
    def known(self) -> list[float]:
        """The log probability of each token."""
        if len(self.logprobs) != len(self.token_ids):
            return [NO_LOGPROB] * len(self.token_ids)
        return [each.logprob for each in self.logprobs]


class _Finished(msgspec.Struct, frozen=True, tag="GenerationFinished", gc=False):
    reason: str
    prompt_tokens: int | None = None
    weights: tuple[WeightSpan, ...] = ()


class _End(msgspec.Struct, frozen=True, tag="End", gc=False):
    frames: int


Frame = TypeVar("Frame")

_Line: TypeAlias = _Started | _Chunk | _Finished | _End

_decode_line: Callable[[bytes], _Line] = msgspec.json.Decoder(_Line).decode
_decode_lines: Callable[[bytes], list[_Line]] = msgspec.json.Decoder(_Line).decode_lines
_decode_begun: Callable[[bytes], _Begun] = msgspec.json.Decoder(_Begun).decode
_decode_prompt = msgspec.json.Decoder(_Prompt | _End).decode
_decode_item = msgspec.json.Decoder(_Item).decode
_decode_whole_item: Callable[[msgspec.Raw], Item] = msgspec.json.Decoder(Item).decode

_NEUTRAL = {
    **{
        name: value
        for name, value in zip(
            reversed(Sampling.__struct_fields__), reversed(Sampling.__struct_defaults__), strict=False
        )
        if value is not UNSET
    },
    "top_p": 1.0,
    "stop": [],
}
"""The values of sampling parameters that change nothing."""

_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}")
"""The id of an item that this server has made, or of its call: it begins with that of its response."""


class Output(msgspec.Struct, frozen=True):
    """The output of a call among the items of a turn."""

    call_id: str
    """The id of the call, or of its item if it has none."""
    written: msgspec.Raw | str
    """The output: in JSON, or as the model reads it."""

    @property
    def text(self) -> str:
        """The output as one text, as far as it is one."""
        return self.written if isinstance(self.written, str) else text_of(msgspec.json.decode(self.written))


@dataclass(frozen=True)
class Head:
    """The place of a recording among others."""

    folder: Path
    response: str
    at: float
    """The time of its beginning, in seconds since 1970."""
    key: str
    model: str
    source: str
    session: str = ""
    """The client's own id of the session."""
    conversation: str = ""
    previous: str = ""
    """The id of the response that it continues, as the request says, or the ids of its items."""
    is_linked: bool = False
    """True if the request says what it continues."""
    opening: str = ""
    """The opening of the items (see `opening`): all turns of a conversation have it, and others that begin alike."""
    has_history: bool = False
    """True if the conversation did not begin with this response."""


@dataclass(frozen=True)
class RecordedTurn:
    """A generation: the tokens that the model read, and those that it wrote."""

    folder: Path
    response: str
    number: int
    """The number of the turn in its response, from 1."""
    at: float
    """The time of its beginning, in seconds since 1970."""
    prompt: array[int]
    output: array[int]
    logprobs: array[float]
    """One for each token of the output."""
    stop: str
    """The reason for its end; empty if it did not reach its end."""
    sampling: Mapping[str, Any]
    weights: tuple[WeightSpan, ...]
    outputs: tuple[Output, ...]
    """The outputs of calls among the items of its request, or for a later turn of a response the new ones."""
    is_held: bool
    """True if a grammar held what it wrote."""
    summarizes: bool
    """True if it wrote the summary of a compaction."""
    left_out: int = 0
    """The tokens at its end that are left out, because the server read no further, or a stage changed their text."""


def recordings_in(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of all recordings in and below ``folders``, each once.

    Raise `UnreadableRecording` for a folder without any.
    """
    seen = set[str]()
    for folder in folders:
        found, real = False, os.path.realpath(folder)
        for place, _, files in os.walk(folder):  # it follows no links
            if _NAMES.isdisjoint(files):
                continue
            found = True
            if len(folders) > 1:
                name = f"{real}{place.removeprefix(str(folder))}"
                if name in seen:
                    continue
                seen.add(name)
            yield Path(place)
        if not found:
            raise UnreadableRecording(folder, None, "there is no recording in or below this folder")


def read_head(folder: Path) -> Head:
    """Read the place of a recording.  Raise `Unusable` if it has no exact tokens, and `UnreadableRecording`."""
    path = folder / TOKENS
    with _opened(folder) as (header, file):
        first = file.readline()
    if not first.endswith(b"\n") or b'"type":"%b"' % STARTED.encode() not in first[:MARKED]:
        raise Unusable(recorded.NO_OUTPUT)
    facts = _decode(path, 2, first, header, _decode_begun).facts
    response = facts.response
    with _readable(path, 2):
        items = facts.items
        begun = facts.origin.opening or opening(map(_decode_whole_item, facts.input), response.id)
    conversation = response.conversation.id if response.conversation else ""
    return Head(
        folder,
        response=_response(folder, facts),
        at=_begun_at(header, response),
        key=facts.origin.key,
        model=header.model,
        source=header.source or "",
        session=facts.origin.session,
        conversation=conversation,
        previous=response.previous_response_id or next(filter(None, (item.response for item in reversed(items))), ""),
        is_linked=bool(response.previous_response_id or conversation),
        opening=conversation or begun,
        has_history=bool(facts.origin.opening or facts.origin.position) or not all(item.is_given for item in items),
    )


def _response(folder: Path, facts: _Facts) -> str:
    """Return the id of a response; another server has ids of its own."""
    return folder.name if (folder / WIRE).is_file() else facts.response.id


def _begun_at(header: Header, response: _Response) -> float:
    return datetime.fromisoformat(header.recorded_at).timestamp() if header.recorded_at else response.created_at


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Header, BinaryIO]]:
    """Open the tokens of a recording, after their header.

    Raise `Unusable` if it has no exact tokens, and `UnreadableRecording`.
    """
    path = folder / TOKENS
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise Unusable(_without_tokens(folder)) from None
    except OSError as error:
        raise UnreadableRecording(path, None, f"there is no recording here: {error.strerror}") from error
    with file:
        header = header_of(path, file.readline())
        if header.masked:
            raise Unusable(recorded.MASKED)
        if header.answered_from:
            raise Unusable(recorded.ANSWERED)
        yield header, file


def _without_tokens(folder: Path) -> str:
    """Return why a recording has no tokens."""
    if (folder / WIRE).is_file():
        return recorded.UNSENT
    headers = [read_header(folder / name) for name, _ in FILES.values() if (folder / name).is_file()]
    return recorded.MASKED if any(header.masked for header in headers) else recorded.NO_TOKENS


def read_turns(folder: Path) -> tuple[RecordedTurn, ...]:
    """Read the turns of a recording.  Raise `Unusable` if it has no exact tokens, and `UnreadableRecording`.

    A file that has no end, because the server was killed, has its whole turns.
    """
    with _opened(folder) as (header, file):
        data = file.read()
    turns, is_ended = _Turns(folder, header), False
    for kind, lines in groupby(_lines(folder / TOKENS, header, data), type):
        is_ended = kind is _End
        if kind is _Chunk:
            turns.take_chunks(list(cast("Iterator[_Chunk]", lines)))
        elif not is_ended:
            for line in cast("Iterator[_Started | _Finished]", lines):
                turns.take(line)
    return turns.all(is_ended=is_ended)


def _lines(path: Path, header: Header, data: bytes) -> Iterable[_Line]:
    """Return the whole lines of a file after its header."""
    body = data[: data.rfind(b"\n") + 1]
    if header.format not in older.CHANGED:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # or else it is read line by line
            return _decode_lines(body)
    return (
        _decode(path, number, line, header, _decode_line) for number, line in enumerate(body.split(b"\n")[:-1], start=2)
    )


def _decode(path: Path, number: int, data: bytes, header: Header, decode: Callable[[bytes], Frame]) -> Frame:
    with _readable(path, number):
        return decode(upgraded(data, header))


@contextmanager
def _readable(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableRecording(path, number, f"not a frame of this file, or of this version: {error}") from error


@dataclass
class _Written:
    """A turn while it is read."""

    started: _Started
    tokens: array[int]
    logprobs: array[float]
    finished: _Finished | None = None


class _Turns:
    """The turns of a file, from its lines."""

    def __init__(self, folder: Path, header: Header) -> None:
        self._folder = folder
        self._header = header
        self._turns: list[_Written] = []

    def take(self, line: _Started | _Finished) -> None:
        """Take the next line, with which a turn begins or ends."""
        if isinstance(line, _Started):
            self._turns.append(_Written(line, array(UINT32), array("d")))
        else:
            self._turns[-1].finished = line

    def take_chunks(self, chunks: Sequence[_Chunk]) -> None:
        """Take the next lines, which have tokens."""
        turn = self._turns[-1]
        turn.tokens.extend([token for chunk in chunks for token in chunk.token_ids])
        turn.logprobs.extend([logprob for chunk in chunks for logprob in chunk.known])

    def all(self, *, is_ended: bool) -> tuple[RecordedTurn, ...]:
        """Return the turns with an output: all if the file has an end, or else those that have one."""
        prompts, served = _Prompts(self._folder, self._header), _Served(self._folder)
        unchanged = unchanged_tokens(self._folder, self._header, [turn.tokens for turn in self._turns])
        made: list[RecordedTurn] = []
        counted: Mapping[int, int] = {}
        for number, turn in enumerate(self._turns, start=1):
            outputs = tuple(served.outputs(number, turn.started.facts))
            if turn.tokens and turn.started.facts.purpose.generates and (is_ended or turn.finished):
                kept = unchanged[number - 1]
                if turn.started.facts.sampling.get("stop"):
                    counted = counted or counted_tokens(self._folder)
                    kept = min(kept, counted.get(number, kept))
                made.append(self._made(number, turn, prompts.of(number, turn), outputs, kept))
        if not made:
            raise Unusable(recorded.NO_OUTPUT)
        return tuple(made)

    def _made(
        self, number: int, turn: _Written, prompt: array[int], outputs: tuple[Output, ...], kept: int
    ) -> RecordedTurn:
        facts, finished = turn.started.facts, turn.finished
        return RecordedTurn(
            self._folder,
            response=_response(self._folder, facts),
            number=number,
            at=_begun_at(self._header, facts.response) + turn.started.at,
            prompt=prompt,
            output=turn.tokens[:kept],
            logprobs=turn.logprobs[:kept],
            stop=finished.reason if finished else "",
            sampling={name: value for name, value in facts.sampling.items() if _NEUTRAL.get(name, UNSET) != value},
            weights=spans(finished.weights, kept) if finished else (),
            outputs=outputs,
            is_held=turn.started.held_to_grammar,
            summarizes=facts.purpose.summarizes,
            left_out=len(turn.tokens) - kept,
        )


class _Resolved(msgspec.Struct, frozen=True):
    history: tuple[_Item, ...] = ()


_decode_resolved: Callable[[bytes], _Resolved] = msgspec.json.Decoder(_Resolved).decode


class _Called(msgspec.Struct, frozen=True, tag="CallFinished"):
    result: str = ""


class _NextTurn(msgspec.Struct, frozen=True, tag="GenerationStarted"):
    pass


class _Listing(msgspec.Struct, frozen=True, tag="McpListToolsOpened"):
    pass


_decode_called: Callable[[bytes], _Called | _NextTurn | _Listing] = msgspec.json.Decoder(
    _Called | _NextTurn | _Listing
).decode

_CALLS = re.compile(rb'"type":"(?:CallFinished|GenerationStarted|McpListToolsOpened)"')

_RESULTS = frozenset({"mcp_call", "code_interpreter_call", "web_search_call", "file_search_call"}) | {
    "shell_call_output",
    "tool_search_output",
    "program_output",
}
"""The types of the items that have the results of calls of the server, or stand for them."""


class _Served:
    """The outputs of calls of a response, as the model read them: not those of calls of programs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = 0

    @cached_property
    def _results(self) -> Sequence[Iterator[str]]:
        """The results of the calls that the server has made before each turn."""
        results, is_listing = list[list[str]]([[]]), False
        path = self._folder / FILES["converse"][0]
        with path.open("rb") if path.is_file() else nullcontext(()) as file:
            for line in file:
                if not (_CALLS.search(line, 0, MARKED) and line.endswith(b"\n")):
                    continue
                match _decode_called(line):
                    case _NextTurn():
                        results.append([])
                    case _Listing():
                        is_listing = True
                    case _Called(result):
                        if not is_listing:
                            results[-1].append(result)
                        is_listing = False
        return [iter(each) for each in results]

    def outputs(self, number: int, facts: _Facts) -> Iterator[Output]:
        """Yield the outputs of calls for the next turn: of a later turn of a response, those that are new in it."""
        items, before = facts.items, self._before
        self._before = len(items)
        of_programs = self._of_programs(items, facts.response.id)
        for item in items[before:] if number > 1 else items:
            is_made = item.type in _RESULTS and (number > 1 or item.is_made_by(facts.response.id))
            made = self._result(number) if is_made else ""
            if item.is_of_program or item.call_id in of_programs:
                continue
            if is_made:
                yield Output(item.call_id or item.id, made)
            elif item.type in _RESULTS or (item.type.endswith("_output") and item.output is not UNSET):
                given = item.result if item.output is UNSET else item.output
                yield Output(item.call_id or item.id, facts.results.get(item.id) or given or "")

    def _result(self, number: int) -> str:
        return next(self._results[number - 1], "") if number <= len(self._results) else ""

    def _of_programs(self, items: Sequence[_Item], response: str) -> set[str]:
        """Return the ids of calls of programs, of which those of the client's are in the history if one has ended."""
        found = {item.call_id for item in items if item.is_of_program}
        if any(item.type == "program_output" and item.is_made_by(response) for item in items):
            path = self._folder / FILES["normalize"][0]
            for line in lines_of(path):
                calls = _decode(path, 2, line.data, line.header, _decode_resolved).history
                found.update(item.call_id for item in calls if item.is_of_program)
        return found - {""}


def text_of(output: Any) -> str:
    """Return the content of an item as one text, as far as it is one."""
    match output:
        case str():
            return output
        case [{"text": str()}, *_]:
            return "".join(str(part.get("text", "")) for part in output)
        case _:
            return msgspec.json.encode(output).decode()


class _Prompts:
    """The prompts of a recording, which are read only if the tokens' file lacks them."""

    def __init__(self, folder: Path, header: Header) -> None:
        self._path = folder / PROMPTS
        self._header = header
        self._read: list[_Prompt] | None = None

    def of(self, number: int, turn: _Written) -> array[int]:
        """Return the prompt of a turn.  Raise `Unusable` if it is not known, or has more than tokens."""
        started, finished = turn.started, turn.finished
        has_images = finished is not None and finished.prompt_tokens not in (None, started.prompt_tokens)
        if started.prompt and not has_images and (finished or not self._path.is_file()):
            return array(UINT32, started.prompt)
        rendered = self._rendered(number, started)
        if has_images or (rendered and rendered.images):
            raise Unusable("the prompt has images")
        tokens = started.prompt or (rendered.token_ids if rendered else ())
        if not tokens:
            raise Unusable(recorded.NO_PROMPTS)
        if len(tokens) != started.prompt_tokens:
            raise Unusable("a stage of yours changed the prompt")
        return array(UINT32, tokens)

    def _rendered(self, number: int, started: _Started) -> _Prompt | None:
        """Return the latest prompt before a turn: some are made only to be measured."""
        if self._read is None:
            self._read = list(self._prompts()) if self._path.is_file() else []
        earlier = [prompt for prompt in self._read if prompt.at is not None and prompt.at <= started.at]
        if earlier:
            return earlier[-1]
        return self._read[number - 1] if number <= len(self._read) else None

    def _prompts(self) -> Iterator[_Prompt]:
        first, *lines = self._path.read_bytes().split(b"\n")
        header = header_of(self._path, first)
        for number, data in enumerate(lines[:-1], start=2):
            try:
                line = _decode_prompt(upgraded(data, header))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise UnreadableRecording(self._path, number, f"not a prompt: {error}") from error
            if isinstance(line, _Prompt):
                yield line
