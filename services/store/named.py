"""The database that the setting ``--store`` names: a file, a URL, or a function of the operator's."""

from __future__ import annotations

from penstock.pipeline.members import missing_members
from penstock.pipeline.plugins import STORES, WrongPlugin, function_named, made_by, names_code
from penstock.services.store.database import Database
from penstock.services.store.sqlite import SqliteDatabase


def named_database(name: str) -> Database:
    """Return the database of that name, not open yet.

    A URL goes to the entry point of the group ``penstock.stores`` with the name of its scheme.  A function of the
    operator's, ``module:function`` or ``file.py:function``, is called without arguments.  Any other name is the path
    of an SQLite file.  Raises `WrongPlugin` if the function is missing or fails, or if it returns no `Database`.
    """
    scheme, separator, _ = name.partition("://")
    if separator:
        return _made(name, scheme, name)
    return _made(name, name) if names_code(name) else SqliteDatabase(name)


def _made(name: str, function: str, *arguments: str) -> Database:
    wanted = "one argument: the URL" if arguments else "no arguments"
    made = made_by(function_named(function, "--store", STORES), name, "--store", *arguments, wanted=wanted)
    if problems := missing_members(made, Database):
        raise WrongPlugin(name, "; ".join(problems), "--store")
    return made  # type: ignore[no-any-return]
