"""The check of a parser of chat models."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import Any

from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.members import missing_members
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import Guarded, OutputStart, TextParser
from penstock.testing.rules import checking


def check_parser(
    parser: Callable[[OutputStart], TextParser],
    examples: Mapping[str, Sequence[Piece]],
    start: OutputStart | None = None,
) -> None:
    """Check that a parser of a chat model's output keeps the rules of `TextParser`.

    ``examples`` are outputs in the markup of the family, each with the pieces that it stands for.  The functions that
    they call are declared.  A parser that needs more, such as a prompt, gets another ``start``.  Raises `BrokenRule` at
    the first rule that it breaks.
    """
    calls = {piece.name: None for pieces in examples.values() for piece in pieces if isinstance(piece, CallPiece)}
    functions = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in calls]
    tester = _Tester(parser, start or OutputStart(functions), examples)
    for name, check in _RULES.items():
        with checking(name):
            check(tester)


_PLAIN = "Plain text, 5 > 3. \nIt's {so} [1]: yes.\n\n"
_WORDS = "and some words "
_FEW, _GROWTH, _MOST_WORK = 50, 4, 6
"""Parts of a short output, and the factors by which a long one has more and may take more work."""

_MOST_PLACES = 8
"""Places in an example at which the work is counted."""

_SHORT, _LONGER, _ROUNDS = 500, 8, 5
"""Parts of a short output whose time is taken, the factor by which a long one has more, and the most rounds."""

_LINEAR, _QUADRATIC = 1.5 * _LONGER, 5 * _LONGER
"""The ratios of the times below which the work is linear at the first look, and above which it is not at the last."""

_MOST_HELD = 100
"""Characters of text that a parser may hold back, as they may be the beginning of a mark."""


@dataclass(frozen=True)
class _Tester:
    """A parser, and outputs for it."""

    make: Callable[[OutputStart], TextParser]
    start: OutputStart
    examples: Mapping[str, Sequence[Piece]]

    def read(self, parts: Iterable[str], *, cut: bool = False) -> list[Piece]:
        """Return the pieces of an output in ``parts``, joined."""
        reader = self.make(self.start)
        pieces = [piece for part in parts for piece in reader.feed(part)]
        return _joined([*pieces, *reader.finish(cut=cut)])

    def beginnings(self) -> Iterable[str]:
        """Yield the beginnings of each example, which leave the parser in any state."""
        return (output[:length] for output in self.examples for length in range(len(output) + 1))

    def texts(self) -> Iterable[str]:
        """Yield outputs after which words are text, unless a call has begun."""
        for output, pieces in self.examples.items():
            is_text = not any(isinstance(piece, CallPiece) for piece in pieces)
            yield from (output[:length] for length in range(0 if is_text else len(output), len(output) + 1))
        signs = {letter: None for output in self.examples for letter in output if not letter.isalnum()}
        yield from (f"{sign} " for sign in signs)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        rule(isinstance(piece, Piece), f"{piece!r} is no piece")
        last = joined[-1] if joined else None
        if isinstance(piece, CallPiece):
            joined.append(piece)
        elif isinstance(last, type(piece)) and not isinstance(last, CallPiece):
            joined[-1] = type(piece)(last.text + piece.text)
        elif piece.text:
            joined.append(type(piece)(piece.text))
    return joined


def _same(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    return [_read_arguments(piece) for piece in one] == [_read_arguments(piece) for piece in other]


def _read_arguments(piece: Piece) -> object:
    """Return the arguments of a piece as JSON, if they are that, and otherwise the piece."""
    with suppress(ValueError):
        return json.loads(piece.text) if isinstance(piece, ArgumentsPiece) else piece
    return piece


def _check_members(tester: _Tester) -> None:
    problems = missing_members(tester.make(tester.start), TextParser)
    rule(not problems, "; ".join(problems))


def _check_examples(tester: _Tester) -> None:
    for output, meant in tester.examples.items():
        found = tester.read([output])
        rule(_same(found, _joined(meant)), f"{output!r} gives {found}, and it should be {list(meant)}")


def _check_chunks(tester: _Tester) -> None:
    for output in tester.examples:
        whole = tester.read([output])
        for at in range(len(output)):
            _check_equal(whole, tester.read([output[:at], output[at:]]), f"{output!r} is cut at {output[at:]!r}")
    for begun in tester.beginnings():
        for output in (begun, begun + _PLAIN):
            for cut in (False, True):
                found = tester.read(output, cut=cut)
                _check_equal(tester.read([output], cut=cut), found, f"{output!r} comes in characters")


def _check_equal(whole: Sequence[Piece], found: Sequence[Piece], case: str) -> None:
    rule(whole == found, f"chunks make no difference: if {case}, it gives {found} instead of {whole}")


def _check_text(tester: _Tester) -> None:
    found = tester.read([_PLAIN])
    rule(_text(found) == _PLAIN, f"plain text is returned as it is: {_PLAIN!r} gives {found}")
    for begun in tester.beginnings():
        for output in (begun, begun + _PLAIN):
            rest = iter(output)
            found = tester.read([output])
            rule(all(letter in rest for letter in _text(found)), f"text is returned once: {output!r} gives {found}")


def _text(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece | ContentPiece))


def _check_arguments(tester: _Tester) -> None:
    for begun in tester.beginnings():
        pieces = tester.read([begun])
        for at, piece in enumerate(pieces):
            follows = at > 0 and isinstance(pieces[at - 1], CallPiece)
            rule(follows or not isinstance(piece, ArgumentsPiece), f"arguments follow their call: {begun!r}")
            is_whole = at + 1 < len(pieces) or begun in tester.examples
            if isinstance(piece, ArgumentsPiece) and is_whole:
                given = _read_arguments(piece)
                rule(isinstance(given, dict), f"the arguments of a call are a JSON object: {begun!r} gives {piece}")


def _check_idle(tester: _Tester) -> None:
    """Check that text which an idle parser need not see is returned as it is, with the kind of the text before it."""
    for output in tester.examples:
        parser = Guarded(tester.make(tester.start), "")
        pieces: list[Piece] = []
        is_idle = False
        for letter in output:
            if is_idle and parser.triggers.isdisjoint(letter):
                is_thought = bool(pieces) and isinstance(pieces[-1], ReasoningPiece)
                pieces.append(ReasoningPiece(letter) if is_thought else ContentPiece(letter))
            else:
                pieces += parser.feed(letter)
                is_idle = parser.triggers.isdisjoint(letter) and parser.is_idle
        pieces += parser.finish(cut=False)
        cure = "give the characters that marks begin with as triggers, and is_idle False while text is held back"
        rule(_joined(pieces) == tester.read([output]), f"an idle parser need not see text: {output!r}: {cure}")


def _check_streams(tester: _Tester) -> None:
    """Check that text comes out at once: after each place of an example without calls, and after a lone sign.

    The end of an output that was cut drops a call that is not whole, so what it still returns was held for nothing.
    """
    for begun in tester.texts():
        reader = tester.make(tester.start)
        for part in (begun, *[_WORDS] * _FEW):
            list(reader.feed(part))
        held = _text(list(reader.finish(cut=True)))
        cure = "return all but the beginning of a mark from feed"
        rule(len(held) <= _MOST_HELD, f"text comes out at once: after {begun!r}, {len(held)} characters wait: {cure}")


def _check_work(tester: _Tester) -> None:
    for output in tester.examples:
        for at in range(0, len(output), max(1, len(output) // _MOST_PLACES)):
            few, many = (_work(tester, output[:at], count) for count in (_FEW, _GROWTH * _FEW))
            steady = f"the work for a part of the text does not grow with the output: after {output[:at]!r}"
            rule(
                many <= _MOST_WORK * few,
                f"{steady}, {_GROWTH} times as many parts take {many / few:.1f} times the work",
            )
            ratio = _time_ratio(tester, output[:at])
            rule(ratio <= _QUADRATIC, f"{steady}, {_LONGER} times as many parts take {ratio:.0f} times the time")


def _time_ratio(tester: _Tester, begun: str) -> float:
    """Return by how much more time of the processor a long output takes than a short one.

    Lines do not show the work of C code, such as a search through all that is held.  The ratio is that of the number of
    parts, or its square.  These are so far apart that the load of the machine does not decide, and each time is the
    least of several rounds, unless the first one is clear.
    """
    few = many = inf
    for _ in range(_ROUNDS):
        few, many = min(few, _time(tester, begun, _SHORT)), min(many, _time(tester, begun, _LONGER * _SHORT))
        if many <= _LINEAR * few:
            break
    return many / few


def _time(tester: _Tester, begun: str, parts: int) -> float:
    """Return the seconds of this thread for an output, without its beginning and its end."""
    reader = tester.make(tester.start)
    list(reader.feed(begun))
    started = time.thread_time()
    for _ in range(parts):
        list(reader.feed(_WORDS))
    return time.thread_time() - started


def _work(tester: _Tester, begun: str, parts: int) -> int:
    """Count the lines run for an output, and the characters of the texts that functions get; C code is not seen."""
    work = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal work
        work += 1
        if event == "call":
            work += sum(len(value) for value in frame.f_locals.values() if isinstance(value, str))
        return trace

    reader = tester.make(tester.start)
    list(reader.feed(begun))
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(parts):
            list(reader.feed(_WORDS))
        list(reader.finish(cut=False))
    finally:
        sys.settrace(previous)
    return work


_RULES: dict[str, Callable[[_Tester], None]] = {
    "members": _check_members,
    "examples": _check_examples,
    "chunks": _check_chunks,
    "text": _check_text,
    "arguments": _check_arguments,
    "idle": _check_idle,
    "streams": _check_streams,
    "work": _check_work,
}
