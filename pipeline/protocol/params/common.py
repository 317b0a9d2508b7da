"""Parts that the models of request bodies share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StringConstraints,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.pipeline.logs import check_names
from penstock.pipeline.protocol.params.foreign_names import ForeignNames
from penstock.pipeline.protocol.params.refusal import UNSUPPORTED, refusal_of


class Body(BaseModel):
    """An object in a body: types are strict, and keys that the API does not have are ignored.

    ``foreign`` are the keys of other APIs that are refused, ``required`` is the key that a client may misspell, and
    ``framing`` are keys of the event that brings a body over a WebSocket.  Unknown keys of a body and of its objects
    are logged, but for those that are ``unused``, which mean nothing here.
    """

    foreign: ClassVar[ForeignNames] = ForeignNames({})
    required: ClassVar[str] = ""
    framing: ClassVar[frozenset[str]] = frozenset()
    unused: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    def __new__(cls, /, **given: Any) -> Self:
        """Raise `TypeError` for a keyword that is no field.  Only a program gives keywords; a body is validated."""
        if given:
            names = {field.alias or name for name, field in cls.model_fields.items()} | cls.model_fields.keys()
            check_names(f"field of {cls.__name__}", given, names)
        return super().__new__(cls)

    def __init__(self, /, **given: Any) -> None:
        """Raise `InvalidRequest` for a wrong value, as for one in a body."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise refusal_of(error, given) from error

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # what is nested in a body is validated without it


class Echoed(Body):
    """An object that a response repeats as the client sent it, unknown keys included."""

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def sent(self) -> dict[str, Any]:
        """The object as the client sent it."""
        return self._sent

    @property
    def without_secrets(self) -> dict[str, Any]:
        """The object as the client sent it, without possible secrets, to be stored or echoed."""
        return self._sent

    @classmethod
    def built(cls, **fields: Any) -> Self:
        """Return the object with these fields, which another API has validated.  What was sent has no None."""
        echoed: Self = cls.model_construct(**fields)
        echoed._sent = {
            key: value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
            for key, value in fields.items()
            if value is not None
        }
        return echoed

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Self:
        echoed: Self = validate(value)
        if isinstance(value, dict):
            echoed._sent = value
        return echoed


def refuse(cure: str = "") -> AfterValidator:
    """Refuse all values of a field but those that ask for nothing; the error ends with the ``cure``."""
    after = {"cure": f": {cure}" if cure else ""}

    def check(value: Any) -> Any:
        if value is not None and value is not False and value != []:
            raise PydanticCustomError(UNSUPPORTED, "This server does not support this parameter{cure}", after)
        return value

    return AfterValidator(check)


@dataclass(frozen=True)
class _Verdict:
    """The reason why a field of the API is declared here although no stage reads it."""

    name: Literal["refused", "unused"]


REFUSED = _Verdict("refused")
UNUSED = _Verdict("unused")

Refused: TypeAlias = Annotated[Any, refuse(), REFUSED]
"""A field that would change or restrict the answer, and cannot: it is refused unless null, false or an empty list."""

Unused: TypeAlias = Annotated[Any, UNUSED]
"""A field that is accepted with any value: it restricts nothing and is a hint, or a fact that no prompt needs."""


def only(*values: Any, cure: str = "") -> AfterValidator:
    """Refuse all values of a field but null and ``values``, with which it does nothing; see `refuse`."""
    after = {"cure": f": {cure}" if cure else ""}

    def check(value: Any) -> Any:
        if value is not None and value not in values:
            raise PydanticCustomError(UNSUPPORTED, "This server does not support this value{cure}", after)
        return value

    return AfterValidator(check)


Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""The name of a tool, a namespace or a format."""

CallId: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=64)]

FAIL_FAST: Any = Field(fail_fast=True)
"""Stop at the first error; only one is reported."""


def at_most(count: int, elements: str) -> BeforeValidator:
    """Refuse an object or a list with more than ``count`` elements before any of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > count:
            raise PydanticCustomError(
                "too_many_keys" if isinstance(value, dict) else "too_long",
                "This should have at most {count} {of}",
                {"count": count, "of": elements},
            )
        return value

    return BeforeValidator(check)


_MetadataKey: TypeAlias = Annotated[str, StringConstraints(max_length=64)]
_MetadataValue: TypeAlias = Annotated[str, StringConstraints(max_length=512)]
Metadata: TypeAlias = Annotated[dict[_MetadataKey, _MetadataValue], at_most(16, "keys")]


def type_of(value: Any) -> Any:
    """Return the ``type`` of an object, validated or not."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


Text = TypeVar("Text")
Value = TypeVar("Value")
TextOr: TypeAlias = Annotated[
    Annotated[Text, Tag("as_text")] | Annotated[Value, Tag("as_other")],
    Discriminator(lambda value: "as_text" if isinstance(value, str) else "as_other"),
]
"""A text or a value of one other type; errors are about the type that the client means."""


def one_of(*types: str, tag: str) -> Callable[[Any], str]:
    """Return a discriminator that gives these types as they are, and ``tag`` for all others."""
    return lambda value: found if (found := type_of(value)) in types else tag
