"""The log: its destination, the response ids in its lines, and numbers and names in words."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import os
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache

from penstock.pipeline.foreign_errors import named_error, traceback_of

current_response: ContextVar[str] = ContextVar("current_response", default="-")
"""The id of the response that the current task works for; ``normalize`` sets it for each new response."""

FORMAT = "%(asctime)s %(levelname)s %(response)s %(name)s: %(message)s"
"""The format of a log line; `name_response` adds the field ``response``."""


def name_response(record: logging.LogRecord) -> bool:
    """Add the id of the current response to ``record``: a filter for log handlers that drops nothing."""
    record.response = current_response.get()
    return True


class Lines(logging.Formatter):
    """Lines of text, of which no record can forge one, whatever a client's texts in it are.

    The first line of a record has all of its message: line breaks, and other characters that do not print, are escaped.
    The lines of its traceback follow, and begin with two spaces.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and the lines of its traceback."""
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        more = [traceback_of(record.exc_info[1])] if record.exc_info and record.exc_info[1] is not None else []
        more += [record.stack_info] if record.stack_info else []
        further = (f"  {printable(line)}" for text in more for line in text.split("\n"))
        return "\n".join([printable(self.formatMessage(record)), *further])


def without_foreign_texts(record: logging.LogRecord) -> bool:
    """Name the errors among the arguments of a record in place of their texts: a filter that drops nothing."""
    if isinstance(record.args, tuple) and any(isinstance(each, BaseException) for each in record.args):
        record.args = tuple(named_error(each) if isinstance(each, BaseException) else each for each in record.args)
    return True


def printable(text: str) -> str:
    """Return a text with escapes in place of line breaks, and of all else that does not print, such as bidi marks."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Coloured(Lines):
    """Lines for a terminal: warnings in yellow, and errors in red."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        line, colour = super().format(record), _COLOURS.get(record.levelno)
        return f"\x1b[{colour}m{line}\x1b[0m" if colour else line


_COLOURS = {logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}


class JsonLines(logging.Formatter):
    """Lines of JSON: time, level, logger, message, the fields that ``extra`` gives, and the error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (response_id := getattr(record, "response", "-")) != "-":
            line["response_id"] = response_id
        plain = _attributes(logging.getLogRecordFactory())
        line |= {name: value for name, value in vars(record).items() if name not in plain and value is not None}
        if record.exc_info and record.exc_info[0] and record.exc_info[1] is not None:
            line["error"] = record.exc_info[0].__name__
            line["traceback"] = traceback_of(record.exc_info[1])
        return json.dumps(line, default=str)  # msgspec refuses bytes of other programs that are not UTF-8


@cache
def _attributes(_: object) -> frozenset[str]:
    """Return the attributes that a factory gives every record, as vLLM's gives its own; others are of ``extra``."""
    return frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "response"})


def log_to_stderr(level: str, *, as_json: bool = False) -> None:
    """Write the log to stderr, vLLM's included; each line of penstock names the response that it is about."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    logging.basicConfig(level=level, format=FORMAT)
    for handler in logging.getLogger().handlers:
        handler.addFilter(name_response)
        handler.addFilter(without_foreign_texts)
        is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        handler.setFormatter(JsonLines() if as_json else Coloured(FORMAT) if is_coloured else Lines(FORMAT))
    logging.captureWarnings(as_json)


class Seldom:
    """Warnings of which each kind is logged once, and then every few seconds as the number of those that came since.

    So a flood of requests that all fail alike is no flood of the log.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._since: dict[str, int] = {}
        """The number of warnings since the last line, by kind; a kind is forgotten when none came for a while."""

    def warn(self, logger: logging.Logger, kind: str, message: str) -> None:
        """Log or count a warning; to be called on the event loop."""
        if kind in self._since:
            self._since[kind] += 1
        else:
            logger.warning("%s", message)
            self._count_anew(logger, kind, message)

    def _count_anew(self, logger: logging.Logger, kind: str, message: str) -> None:
        self._since[kind] = 0
        asyncio.get_running_loop().call_later(self._seconds, self._tell, logger, kind, message)

    def _tell(self, logger: logging.Logger, kind: str, message: str) -> None:
        if count := self._since.pop(kind):
            logger.warning("%s (%d more in %s)", message, count, duration(self._seconds))
            self._count_anew(logger, kind, message)


def json_line(level: str, name: str, text: str) -> str:
    """Return a line of JSON for a line of text that another program has logged."""
    return JsonLines().format(logging.makeLogRecord({"levelname": level, "name": name, "msg": text}))


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a number in a ``form`` with its noun, whose plural ends in "s", or in "ies" for a consonant and "y"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{number:{form}} {noun if number == 1 else plural}"


def nearest(name: str, known: Iterable[str], likeness: float = 0.7) -> str:
    """Return the end of a message about an unknown name: the nearest known one, in any case, if one is near."""
    by_folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=likeness)
    return f" (did you mean {by_folded[near[0]]}?)" if near else ""


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `TypeError` for the first name of a ``kind`` that is not known."""
    known = tuple(known)
    for name in names:
        if name not in known:
            raise TypeError(f"there is no {kind} {name!r}{nearest(name, known)}")


def duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least one: ``30 d``, ``1.5 h``, ``20 s``."""
    size, unit = next((each for each in _UNITS if seconds >= each[0]), (1, "s"))
    return f"{seconds / size:.3g} {unit}"


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
