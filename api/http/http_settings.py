"""The settings of the HTTP server, and of the clients that may use it."""

from __future__ import annotations

import os
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, CliSuppress, NoDecode

from penstock.api.http.api_key import LEAST_LENGTH
from penstock.api.values import Duration, Size, Texts, web_address

ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The hosts that mean all addresses of a machine, each with the address at which the machine reaches itself."""


def frontend_count(value: Any) -> Any:
    """Return the number of frontends for ``auto``; leave anything else to pydantic."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2)) if value == "auto" else value


def is_loopback(host: str) -> bool:
    """True if a server that listens on ``host`` is reached from its own machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_here(host: str) -> bool:
    """True if other machines cannot reach this one under ``host``."""
    return host in ANY or is_loopback(host)


class HttpSettings(BaseSettings):
    """The HTTP server."""

    SECTION: ClassVar[str] = "HTTP"

    host: str = Field(default="127.0.0.1", title="HOST", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on")
    frontends: Annotated[int, BeforeValidator(frontend_count)] = Field(
        default=1,
        gt=0,
        title="N",
        description="server processes on one engine and one port; auto means one for every two cores, 8 at most",
        examples=["auto"],
    )
    max_body_bytes: Size = Field(
        default="32MiB",
        validate_default=True,
        description="largest request body; larger ones, and bodies with more than a million commas, get a 413",
    )
    max_upload_bytes: Size = Field(
        default="512MiB",
        validate_default=True,
        description="largest file that the Files API takes; --max-file-bytes limits those that a model reads",
    )
    trusted_proxy: Texts = Field(
        default=[],
        title="ADDRESS",
        description="address or network of proxies, whose headers name the client and the host; those of others are "
        "ignored; repeatable",
        examples=["10.0.0.0/8"],
    )
    forwarded_header: Literal["X-Forwarded-For", "Forwarded"] = Field(
        default="X-Forwarded-For",
        title="HEADER",
        description="header to which those proxies append the address of their client: X-Forwarded-For or Forwarded",
    )
    dialect: Texts = Field(
        default=[],
        title="DIALECT",
        description="a dialect of your own, beside those of penstock: file.py:NAME, module:NAME or the name of an "
        "entry point; repeatable",
        examples=["toy.py:TOY"],
    )
    embeddings: str | None = Field(
        default=None,
        title="URL",
        description="URL of a server that answers embeddings, scores and rankings in place of this one; "
        "PENSTOCK_EMBEDDINGS_KEY holds its key",
        examples=["http://127.0.0.1:8001"],
    )
    embeddings_key: CliSuppress[SecretStr | None] = Field(default=None, repr=False)
    keep_alive: Duration = Field(
        default="15s",
        validate_default=True,
        gt=0,
        description="time of silence after which a stream gets a comment, so that no proxy closes it",
    )
    drain_timeout: Duration = Field(
        default="20s",
        validate_default=True,
        description="time that running responses get after SIGTERM; then they end as failed",
    )

    @field_validator("trusted_proxy")
    @classmethod
    def _networks(cls, networks: list[str]) -> list[str]:
        for network in networks:
            ip_network(network)
        return networks

    @field_validator("embeddings")
    @classmethod
    def _without_version(cls, url: str | None) -> str | None:
        return None if url is None else web_address(url).rstrip("/").removesuffix("/v1")

    def url(self, port: int) -> str:
        """Return the URL at which its own machine reaches this server, which listens on ``port``."""
        host = ANY.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class ClientSettings(BaseSettings):
    """The clients that may use the server."""

    SECTION: ClassVar[str] = "Clients"

    api_key_file: Path | None = Field(
        default=None,
        title="FILE",
        description="a file of API keys, one per line; PENSTOCK_API_KEYS holds keys as well",
        examples=["/etc/penstock/keys"],
    )
    api_keys: CliSuppress[Annotated[str | tuple[str, ...] | None, NoDecode]] = Field(default=None, repr=False)
    operator_key: CliSuppress[SecretStr | None] = Field(default=None, min_length=LEAST_LENGTH, repr=False)
    live: bool = Field(
        default=False,
        description="print the address of the live page, on a loopback address with a key that is made for this run",
    )
    store_keys: bool = Field(default=False, description="read API keys from the store, too; penstock keys makes them")
    sign_in: Path | None = Field(
        default=None,
        title="FILE",
        description="a TOML file of OIDC issuers, whose bearer tokens sign clients in beside the keys; read again at "
        "SIGHUP",
        examples=["/etc/penstock/sign-in.toml"],
    )
    limits: Path | None = Field(
        default=None,
        title="FILE",
        description="a TOML file of limits for API keys: requests, tokens, responses at once, weights; read again at "
        "SIGHUP",
        examples=["/etc/penstock/limits.toml"],
    )
    seal_key_file: Path | None = Field(
        default=None,
        title="FILE",
        description="a file of keys, one per line, that seal what clients keep: the first seals, all open; "
        "PENSTOCK_SEAL_KEYS holds keys as well; by default a key in the store",
        examples=["/etc/penstock/seal-keys"],
    )
    seal_keys: CliSuppress[Annotated[str | tuple[str, ...] | None, NoDecode]] = Field(default=None, repr=False)
    allow_host: Texts = Field(
        default=[],
        title="NAME",
        description="a name of this server besides addresses, localhost and --host, if it has no keys; repeatable",
        examples=["gpubox"],
    )
    allow_origin: Texts = Field(
        default=[],
        title="ORIGIN",
        description="an origin whose web pages may use this server, or * for all; repeatable",
        examples=["https://chat.example"],
    )

    @field_validator("allow_host")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"{name!r} is not the name of a host: leave out scheme and port")
        return names

    @field_validator("allow_origin")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+/?", origin, re.IGNORECASE):
                raise ValueError(f"{origin!r} is not an origin: it needs a scheme, a host, and a port if it has one")
        return origins

    @property
    def has_keys(self) -> bool:
        """True if a request needs an API key, or a token of an issuer."""
        has_own = self.api_key_file is not None or self.api_keys is not None
        return has_own or self.store_keys or self.sign_in is not None
