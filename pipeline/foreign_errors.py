"""Errors of libraries, in words that hold none of the secrets which a library was given.

The text of such an error may repeat them: aiohttp's have all headers of a request in their ``repr``, asyncpg's the
values of a row, pydantic's the whole input, and those of URLs a password.  So code that catches one writes
`named_error`, and the log leaves its text out of tracebacks.  ``tests/unit/test_error_texts.py`` finds other modules.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

from penstock.pipeline.errors import StageError

GIVEN_SECRETS = frozenset(
    {
        "aiohttp",
        "asyncpg",
        "cryptography",
        "grpc",
        "h11",
        "http",
        "httpcore2",
        "httpx2",
        "jwt",
        "mcp",
        "mcp_types",
        "multidict",
    }
    | {"opentelemetry", "pydantic", "pydantic_core", "pydantic_settings", "requests", "sqlite3", "urllib", "urllib3"}
    | {"yarl", "zmq"}
)
"""Libraries that get keys, headers, URLs, rows or whole requests: the texts of their errors are written nowhere."""

LEFT_OUT = "its text is left out, as it may hold secrets"

_JOINTS = {
    True: "\nIt was the direct cause of this exception:\n\n",
    False: "\nWhile it was handled, this followed:\n\n",
}


def is_own(error: BaseException) -> bool:
    """Return True for an error of penstock's, or of a stage that raises one for its client."""
    return isinstance(error, StageError) or type(error).__module__.partition(".")[0] == "penstock"


def named_error(error: BaseException) -> str:
    """Return the text of an own error; of any other the name of its class, and what its system or database calls it."""
    if is_own(error):
        return str(error)
    kind = type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    code = os.strerror(number) if number and number > 0 else _code(error)
    return f"{kind}: {code}" if code else kind


def text_of(error: BaseException) -> str:
    """Return the text of an error, or that it is left out: for the log, and for recordings."""
    return LEFT_OUT if _may_tell(error) else str(error)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and of its causes, without the texts that may hold secrets."""
    return "".join(_chain(error, set())).rstrip("\n")


def _code(error: BaseException) -> str:
    """Return SQLite's name of an error, or the SQLSTATE that PostgreSQL gave it."""
    found = getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None)
    return found if isinstance(found, str) and found.isascii() and found.replace("_", "").isalnum() else ""


def _may_tell(error: BaseException) -> bool:
    """Return True for an error whose class, or whose code, is in one of the libraries that were given secrets."""
    if is_own(error):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    modules = {type(error).__module__, *(str(frame.f_globals.get("__name__", "")) for frame, _ in frames[-1:])}
    return any(module.partition(".")[0] in GIVEN_SECRETS for module in modules)


def _chain(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and id(earlier) not in seen:
        yield from _chain(earlier, seen)
        yield _JOINTS[error.__cause__ is not None]
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__)
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    yield "\n".join([f"{module}{kind.__qualname__}: {text_of(error)}", *getattr(error, "__notes__", ())]) + "\n"
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield "\nIt holds this exception:\n\n"
            yield from _chain(inner, seen)
