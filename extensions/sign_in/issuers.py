"""The file of ``--sign-in``: the issuers, and what their claims give an owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import ErrorDetails

from penstock.api.toml_file import message_of, read_toml
from penstock.api.values import Duration
from penstock.extensions.sign_in.discovery import checked_address
from penstock.extensions.sign_in.key_sets import ALGORITHMS
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.logs import nearest


class UnusableSignIn(CannotStart):
    """The file of ``--sign-in`` cannot be read, or has a mistake."""


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _algorithm(name: str) -> str:
    if name not in ALGORITHMS:
        raise ValueError(f"expected some of {', '.join(ALGORITHMS)}")
    return name


Address = Annotated[str, AfterValidator(checked_address)]
Text = Annotated[str, Field(min_length=1)]
OneOrMore = Annotated[list[Text], BeforeValidator(_texts), Field(min_length=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Grant(_Table):
    """The team, limits, models and tools of owners whose claim has a certain value, and if they may be recorded."""

    team: Text | None = None
    limits: Text | None = None
    models: OneOrMore | None = None
    tools: OneOrMore | None = None
    record: bool = True


class Issuer(_Table):
    """One issuer, and the names of the claims that are read of its tokens."""

    audience: OneOrMore
    """The names of this server: a token is for one of them."""
    algorithms: Annotated[
        list[Annotated[str, AfterValidator(_algorithm)]], BeforeValidator(_texts), Field(min_length=1)
    ] = list(ALGORITHMS)
    skew: Annotated[Duration, Field(le=600)] = 60.0
    """Seconds by which the clocks of issuer and server may differ."""
    type: Literal["at+jwt"] | None = None
    """The only type of token that is taken; None for access tokens and others, such as those of identity."""
    jwks: Address | None = None
    """The URL of the keys; None to ask the issuer for it."""
    owner: Text = "sub"
    name: Text = "email"
    team: Text | None = None
    limits: Text | None = None
    models: Text | None = None
    require: dict[str, OneOrMore] = {}
    """The values of which a claim must have one."""
    claims: dict[str, dict[str, Grant]] = {}
    """Grants by claim and value: the first one counts that a token has."""


class _File(_Table):
    issuers: Annotated[dict[Address, Issuer], Field(min_length=1)]


def read_issuers(file: Path) -> Mapping[str, Issuer]:
    """Return the issuers of a file by their URLs; raises `UnusableSignIn`."""
    read = read_toml("--sign-in", file, _File.model_validate, UnusableSignIn, _mistake)
    return MappingProxyType(read.issuers)


def check_grants(file: Path, issuers: Mapping[str, Issuer], check: Callable[[Grant], None]) -> None:
    """Raise `UnusableSignIn` for the first grant that ``check`` raises `ValueError` for."""
    for url, issuer in issuers.items():
        for claim, values in issuer.claims.items():
            for value, grant in values.items():
                try:
                    check(grant)
                except ValueError as error:
                    raise UnusableSignIn(f"--sign-in {file}: {url}.claims.{claim}.{value}: {error}") from None


def _mistake(error: ErrorDetails) -> str:
    path = [str(each) for each in error["loc"] if each != "[key]"]
    message = message_of(error)
    if error["type"] == "extra_forbidden":
        known: Collection[str] = Issuer.model_fields if len(path) == 3 else Grant.model_fields
        message = f"there is no such key{nearest(path[-1], known if len(path) > 1 else _File.model_fields)}"
    return f"{'.'.join(path)}: {message}"
