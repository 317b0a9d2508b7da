"""A TOML file of the operator beside the settings, such as that of limits: each mistake is named by its key."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.pipeline.errors import CannotStart

Contents = TypeVar("Contents")


def read_toml(
    option: str,
    file: Path,
    check: Callable[[dict[str, Any]], Contents],
    unusable: type[CannotStart],
    mistake: Callable[[ErrorDetails], str],
    parse_float: Callable[[str], Any] = float,
) -> Contents:
    """Return the contents of the file that an option names, as ``check`` returns them.

    Raises ``unusable`` if the file cannot be read, and for a `ValidationError` of ``check``, each error of which
    ``mistake`` describes.
    """
    source = f"{option} {file}"
    try:
        return check(tomllib.loads(file.read_text(encoding="utf-8-sig"), parse_float=parse_float))
    except OSError as error:
        raise unusable(f"{source}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise unusable(f"{source}: {error}") from error
    except ValidationError as error:
        raise unusable(f"{source}: {'; '.join(map(mistake, error.errors()))}") from error


def message_of(error: ErrorDetails) -> str:
    """Return the message of an error, as the check that found it has written it."""
    return error["msg"].removeprefix("Value error, ")
