"""Forms, by which items and parts in a body are read.

A client may leave out what the server chooses, and send null for what is optional.  So the
`form` of a class is a struct that is made of it, and of the few fields that are other ones in a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from types import GenericAlias, MappingProxyType, NoneType
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args, get_type_hints

import msgspec

from penstock.pipeline.protocol.items import BaseItem

LEFT_OUT: Final = object()
"""The type of a field that a request does not have."""

AnyStatus: TypeAlias = Literal[
    "in_progress", "completed", "incomplete", "failed", "searching", "interpreting", "calling"
]
"""The status of a call at any server."""

_RUNNING = frozenset({"searching", "interpreting", "calling"})
_CHOSEN = {"id": "", "status": "completed"}


class Sent:
    """An object of a body, which becomes another one."""

    __slots__ = ()

    def whole(self) -> Any:
        """Return what the object becomes."""
        raise NotImplementedError


def whole(value: Any) -> Any:
    """Return a value of a body with each object, also in a list, as what it becomes."""
    if isinstance(value, tuple):
        return tuple([each.whole() if isinstance(each, Sent) else each for each in value])
    return value.whole() if isinstance(value, Sent) else value


class Fields(msgspec.Struct, Sent, frozen=True, kw_only=True, omit_defaults=True):
    """An object that becomes a dict of the known fields that the client sent, without nulls."""

    def whole(self) -> dict[str, Any]:
        """Return the dict."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class Form(msgspec.Struct, Sent, frozen=True, kw_only=True):
    """An item or a part as a client sends it, which becomes one of the class ``kind``."""

    kind: ClassVar[Any]
    absent: ClassVar[dict[str, Any]]
    """The values of the optional fields that are null."""
    nested: ClassVar[tuple[str, ...]]
    """The fields with objects that become others."""
    statuses: ClassVar[dict[str, str]]
    """The status for each one that the class does not have."""
    changes: ClassVar[tuple[Callable[[dict[str, Any]], None], ...]]

    def whole(self) -> Any:
        """Return the item or the part."""
        fields = msgspec.structs.asdict(self)
        if None in fields.values():
            fields |= {name: self.absent.get(name) for name, value in fields.items() if value is None}
        for name in self.nested:
            fields[name] = whole(fields[name])
        if self.statuses and fields["status"] in self.statuses:
            fields["status"] = self.statuses[fields["status"]]
        for change in self.changes:
            change(fields)
        return self.kind(**fields)


def form(
    kind: type[msgspec.Struct],
    *changes: Callable[[dict[str, Any]], None],
    chosen: Mapping[str, Any] = MappingProxyType({}),
    is_closed: bool = False,
    base: type[Form] = Form,
    **given: Any,
) -> Any:
    """Return the form of a class; ``given`` are the types of the fields that are other ones in a request.

    What the class requires is required, but for what is ``chosen``, as the id and the status are.  Unknown keys are
    ignored unless the form ``is_closed``.  Last, ``changes`` make the fields those of the class.
    """
    own, hints = {field.name: field for field in msgspec.structs.fields(kind)}, get_type_hints(kind)
    absent = {name: value for name, value in _CHOSEN.items() if name in own}
    absent |= {name: field.default for name, field in own.items() if not field.required} | dict(chosen)
    types = {name: each for name, each in given.items() if name not in own}
    types |= {name: hints[name] | None if name in absent else hints[name] for name in own} | given
    about = {
        "kind": kind,
        "absent": absent,
        "nested": tuple(name for name, each in given.items() if _has_objects(each)),
        "statuses": _statuses(hints.get("status")) if "status" in given else {},
        "changes": changes,
    }
    return msgspec.defstruct(
        f"{kind.__name__}{'Item' if issubclass(kind, BaseItem) else 'Part'}",
        [_field(name, each, own, absent) for name, each in types.items() if each is not LEFT_OUT],
        bases=(base,),
        namespace={"__doc__": kind.__doc__, **about},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=is_closed,
        tag_field="type",
        tag=kind.__struct_config__.tag,
    )


def _field(name: str, kind: Any, own: Mapping[str, Any], absent: Mapping[str, Any]) -> tuple[str, Any, Any]:
    default = absent.get(name, None if NoneType in get_args(kind) else msgspec.NODEFAULT)
    written = own[name].encode_name if name in own else name
    return name, kind, msgspec.field(default=None if isinstance(default, dict) else default, name=written)


def _statuses(status: Any) -> dict[str, str]:
    """Return the status of an item for each one that is not of the type ``status``."""
    words = {word for each in (status, *get_args(status)) for word in get_args(each) if isinstance(word, str)}
    running = "in_progress" if "in_progress" in words else "completed"
    foreign = set(get_args(AnyStatus)) - words
    return {word: running if word in _RUNNING else "completed" for word in foreign}


def _has_objects(kind: Any) -> bool:
    return any(map(_has_objects, get_args(kind))) or (isinstance(kind, type) and issubclass(kind, Sent))


def one_of(*kinds: Any) -> Any:
    """Return the union of types."""
    return reduce(or_, kinds)


def list_of(*kinds: Any) -> Any:
    """Return the type of a list whose elements are of any of the types."""
    return GenericAlias(tuple, (one_of(*kinds), ...))
