"""The settings of the store, and of the servers that share it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from penstock.api.http.http_settings import is_here
from penstock.api.values import Duration, web_address
from penstock.pipeline.plugins import STORES, installed, names_code
from penstock.pipeline.urls import shown_url

NO_STORE = "none"
"""The value of ``--store`` for a server that stores nothing."""


def store_place(store: str) -> str:
    """Return the place of a store, with the home folder of ``~``; raise `ValueError` if there is no such store."""
    scheme, separator, _ = store.partition("://")
    schemes = installed(STORES)
    if scheme not in schemes if separator else re.match("postgres(ql)?//", store):
        urls = "".join(f"{each}://..., " for each in sorted(schemes))
        raise ValueError(f"give the path of a file, {urls}file.py:function, or none")
    return store if separator else os.path.expanduser(store)  # noqa: PTH111 (a path would lose the dot of ./)


def is_file(place: str) -> bool:
    """True if a store is a file, which need not exist."""
    return place != NO_STORE and "://" not in place and not names_code(place)


def is_missing(place: str) -> bool:
    """True if a store is a file that does not exist."""
    return is_file(place) and not Path(place).exists()


def without_password(store: str) -> str:
    """Return the setting ``store`` as it may be shown."""
    return shown_url(store, with_path=True) if "://" in store else store


def _data_folder() -> Path:
    """Return the folder for a user's data, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "penstock"


def is_stored_here(store: str) -> bool:
    """True if the store is on this machine: a file, or a database at a local address or socket."""
    url = urlsplit(store)
    hosts = (url.hostname or "", *parse_qs(url.query).get("host", ()))
    return all(is_here(host) or host.startswith("/") for host in hosts)


class StoreSettings(BaseSettings):
    """The store of responses, and the responses that run in the background."""

    SECTION: ClassVar[str] = "Store"

    store: str = Field(
        default_factory=lambda: str(_data_folder() / "responses.sqlite3"),
        title="STORE",
        description="the SQLite file that stores responses, a PostgreSQL database (postgresql://...), none, or "
        "file.py:function or module:function, for a store of your own",
    )
    store_ttl: Duration = Field(default="30d", validate_default=True, description="time for which responses are stored")
    stream_ttl: Duration = Field(
        default="1d", validate_default=True, description="time for which the events of their streams are stored"
    )
    max_background: int = Field(
        default=64, gt=0, description="background responses that run at once; the others wait in order"
    )
    resume_interrupted: bool = Field(
        default=False,
        description="run interrupted background responses of a dead server again, instead of ending them as failed",
    )
    detach: bool = Field(default=False, description="let a stored response go on if its client disconnects")

    @field_validator("store")
    @classmethod
    def _store(cls, store: str) -> str:
        return store_place(store)


class ServersSettings(BaseSettings):
    """The servers that share a store."""

    SECTION: ClassVar[str] = "Several servers"

    peer_url: str | None = Field(
        default=None,
        validate_default=True,
        title="URL",
        description="URL at which the other servers of the store reach this one; by default http://HOST:PORT",
        examples=["http://10.0.0.2:8000"],
    )
    heartbeat: Duration = Field(
        default="2s", validate_default=True, gt=0, description="time between two heartbeats in the store"
    )
    stale_after: Duration = Field(
        default="15s",
        validate_default=True,
        gt=0,
        description="time without a heartbeat after which a server counts as dead",
    )

    unserved_after: Duration = Field(
        default="1h",
        validate_default=True,
        description="time after which a background response fails that waits for a server of its model",
    )

    @field_validator("peer_url")
    @classmethod
    def _reachable(cls, url: str | None) -> str | None:
        return None if url is None else web_address(url)

    @property
    def stale(self) -> float:
        """Seconds without a heartbeat after which a server is dead: at least five periods, as a beat may be late."""
        return max(self.stale_after, 5 * self.heartbeat)
