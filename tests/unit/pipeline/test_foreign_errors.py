"""Errors of libraries are named, and the texts that may hold secrets stay out of tracebacks."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from urllib.parse import urlsplit

import aiohttp
import asyncpg
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from pydantic import BaseModel
from yarl import URL

from penstock.pipeline.errors import EngineFailed, InvalidRequest
from penstock.pipeline.foreign_errors import LEFT_OUT, named_error, text_of, traceback_of
from penstock.pipeline.recordings.format import Failure

SECRET = "canary-71c0"


def refused() -> aiohttp.ClientResponseError:
    url, headers = URL(f"http://me:{SECRET}@h/?k={SECRET}"), CIMultiDictProxy(CIMultiDict({"Authorization": SECRET}))
    return aiohttp.ClientResponseError(aiohttp.RequestInfo(url, "GET", headers, url), (), message=SECRET)


class Number(BaseModel):
    value: int


def wrong_port() -> None:
    _ = urlsplit(f"http://me:{SECRET}/").port


def wrong_value() -> None:
    Number.model_validate({"value": SECRET})


def wrong_url() -> None:
    URL(f"http://h:{SECRET}")


def wrong_statement() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"select '{SECRET}")


def raise_refused() -> None:
    raise refused()


def duplicate() -> None:
    raise asyncpg.UniqueViolationError(f"Key (id)=({SECRET}) already exists.")


FAULTS = [wrong_port, wrong_value, wrong_url, wrong_statement, raise_refused, duplicate]


@pytest.mark.parametrize("fault", FAULTS)
def test_no_secret_is_in_the_words_for_an_error(fault: object) -> None:
    words: list[str] = []
    try:
        try:
            fault()  # type: ignore[operator]
        except Exception as error:
            words = [named_error(error), text_of(error), Failure.of(error).message]
            raise RuntimeError("This is ours.") from error
    except RuntimeError as error:
        words.append(traceback_of(error))
    assert not any(SECRET in each for each in words)
    assert "This is ours." in words[-1]
    assert LEFT_OUT in words[-1]
    assert f"in {fault.__name__}" in words[-1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (EngineFailed("The engine fails.", "at http://a"), "The engine fails. (at http://a)"),
        (InvalidRequest("No."), "No."),
        (ConnectionRefusedError(111, f"Connect call failed {SECRET}"), "ConnectionRefusedError: Connection refused"),
        (OSError(f"Multiple exceptions: {SECRET}"), "OSError"),
        (OSError(-2, SECRET), "OSError"),
        (TimeoutError(), "TimeoutError"),
        (KeyError(SECRET), "KeyError"),
        (asyncpg.InvalidPasswordError(SECRET), "InvalidPasswordError: 28P01"),
        (refused(), "ClientResponseError"),
    ],
)
def test_an_error_is_named(error: Exception, name: str) -> None:
    assert named_error(error) == name


def test_full_disk_of_sqlite_is_named() -> None:
    error = sqlite3.OperationalError(SECRET)
    error.sqlite_errorname = "SQLITE_FULL"
    assert named_error(error) == "OperationalError: SQLITE_FULL"


def test_own_errors_and_those_of_python_keep_their_texts() -> None:
    """They are what the log is for."""
    with pytest.raises(KeyError) as caught:
        _ = dict[str, str]()["field"]
    assert "KeyError: 'field'" in traceback_of(caught.value)
    assert "EngineFailed: It fails." in traceback_of(EngineFailed("It fails."))


def test_a_chain_that_ends_in_itself_is_written_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    group = ExceptionGroup("both", [first, OSError("third")])
    written = traceback_of(group)
    assert [written.count(name) for name in ("first", "second", "third")] == [1, 1, 1]
