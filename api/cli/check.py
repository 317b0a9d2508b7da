"""Check: verify what a server needs, without loading its model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

from penstock.api.cli.mistakes import placed

Check: TypeAlias = Callable[[], Awaitable[str]]
"""A check: it describes what it found, or raises the error that ends the start of a server."""


async def all_pass(checks: Mapping[str, Check], errors: tuple[type[Exception], ...], arguments: Sequence[str]) -> bool:
    """Run all checks, and print what each found; return False if one has raised any of ``errors``.

    Options that an error names are shown where the operator set them, on the command line ``arguments`` or elsewhere.
    """
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok     {name}: {await check()}", flush=True)
        except errors as error:
            failed += 1
            print(f"wrong  {name}: {placed(str(error), arguments)}", flush=True)
    return not failed


def without_password(store: str) -> str:
    """Return the setting ``store`` as it may be shown."""
    password = urlsplit(store).password if "://" in store else None
    return store.replace(f":{password}@", ":***@") if password else store
