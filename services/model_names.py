"""Names of models: those that the engine serves, and aliases, which are patterns of names for one of them each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.pipeline.errors import ModelNotFound
from penstock.pipeline.logs import nearest
from penstock.pipeline.protocol.params.json_body import shortened

MOST_NAMED = 5
"""The most names to list in an error; a server of recordings may have thousands."""


LONGEST_NAME = 256
"""The characters of the longest name of a model."""


def served_name(name: str, served: Collection[str], aliases: Mapping[str, str]) -> str | None:
    """Return the served name that a ``name`` stands for: itself, or that of the first pattern; None if unknown."""
    if name in served:
        return name
    models = (model for pattern, model in aliases.items() if model in served and fnmatchcase(name, pattern))
    return next(models, None)


def is_allowed(name: str, allowed: Collection[str] | None) -> bool:
    """Return True if one of the ``allowed`` patterns fits a name or an alias, or all are allowed, as None."""
    return allowed is None or any(fnmatchcase(name, pattern) for pattern in allowed)


def usable_names(served: Sequence[str], aliases: Mapping[str, str], allowed: Collection[str] | None) -> Sequence[str]:
    """Return the served names that a client may use; raise `ModelNotFound` if it may use none (see `allowed_names`)."""
    usable = allowed_names(served, aliases, allowed)
    if not usable and allowed is not None:
        raise ModelNotFound("This key may use none of the models of this server.", param="model")
    return usable


def allowed_names(served: Sequence[str], aliases: Mapping[str, str], allowed: Collection[str] | None) -> Sequence[str]:
    """Return the served names that a client may use whose key allows it these patterns of names and aliases.

    All are usable if ``allowed`` is None.
    """
    if allowed is None:
        return served
    meant = {model for pattern, model in aliases.items() if is_allowed(pattern, allowed)}
    meant |= meant_by(allowed, served, aliases)
    return [name for name in served if name in meant or is_allowed(name, allowed)]


def meant_by(allowed: Iterable[str], served: Collection[str], aliases: Mapping[str, str]) -> set[str]:
    """Return the served names that the names of a key stand for, as in a request; its patterns stand for none here."""
    return {name for one in allowed if is_name(one) and (name := served_name(one, served, aliases)) is not None}


def resolved_name(name: str, served: Sequence[str], aliases: Mapping[str, str]) -> str:
    """Return the served name that a ``name`` stands for; raise `ModelNotFound` if it stands for none."""
    model = served_name(name, served, aliases)
    if model is None:
        known = (pattern for pattern, target in aliases.items() if target in served)
        raise ModelNotFound(f"This server serves {served_instead(name, served, known)}.", param="model")
    return model


def is_name(pattern: str) -> bool:
    """Return True for the alias of one name, and False for a pattern of many."""
    return not {*"*?["} & {*pattern}


def covers(pattern: str, other: str) -> bool:
    """Return True if all names that fit the narrower ``other`` pattern are known to fit the first one, too.

    It is known only of patterns without sets, and of a first one whose only wildcard is ``*``.
    """
    is_known = not (is_name(other) or {*"?["} & {*pattern} or "[" in other)
    return is_known and pattern != other and fnmatchcase(other, pattern)


def wrong_name(name: str) -> str:
    """Return why a text is no name for a model; empty if it is one."""
    if not name.strip():
        return "the name of a model cannot be empty"
    if not name.isprintable():
        return f"{shortened(name)!a} has characters that cannot be printed"
    if len(name) > LONGEST_NAME:
        return f"{shortened(name)!r} is longer than {LONGEST_NAME} characters"
    return ""


def served_instead(name: str, served: Sequence[str], aliases: Iterable[str] = ()) -> str:
    """Return the served names instead of an unknown one, for an error, with the name that is meant if one is near."""
    name = shortened(name)
    return f"{in_words(served)}, not {name!r}{nearest(name, (*served, *filter(is_name, aliases)))}"


def in_words(served: Sequence[str]) -> str:
    """Return the served names for an error."""
    more = len(served) - MOST_NAMED
    return ", ".join(map(repr, served[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
