"""Names of models: those that the engine serves, and aliases, which are patterns of names for one of them each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.pipeline.errors import ModelNotFound
from penstock.pipeline.logs import nearest
from penstock.pipeline.protocol.params.json_body import shortened

MOST_NAMED = 5
"""The most names to list in an error; a server of recordings may have thousands."""


def served_name(name: str, served: Collection[str], aliases: Mapping[str, str]) -> str | None:
    """Return the served name that a ``name`` stands for: itself, or that of the first pattern; None if unknown."""
    if name in served:
        return name
    return next((model for pattern, model in aliases.items() if fnmatchcase(name, pattern)), None)


def resolved_name(name: str, served: Sequence[str], aliases: Mapping[str, str]) -> str:
    """Return the served name that a ``name`` stands for; raise `ModelNotFound` if it stands for none."""
    model = served_name(name, served, aliases)
    if model is None:
        raise ModelNotFound(f"This server serves {served_instead(name, served, aliases)}.", param="model")
    return model


def is_name(pattern: str) -> bool:
    """Return True for the alias of one name, and False for a pattern of many."""
    return not {*"*?["} & {*pattern}


def served_instead(name: str, served: Sequence[str], aliases: Iterable[str] = ()) -> str:
    """Return the served names instead of an unknown one, for an error, with the name that is meant if one is near."""
    name = shortened(name)
    return f"{in_words(served)}, not {name!r}{nearest(name, (*served, *filter(is_name, aliases)))}"


def in_words(served: Sequence[str]) -> str:
    """Return the served names for an error."""
    more = len(served) - MOST_NAMED
    return ", ".join(map(repr, served[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
