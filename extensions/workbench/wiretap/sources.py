"""The sources of the models that a server serves: the folders or ids in its own list of models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, hdrs
from yarl import URL

from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.json_body import NO_JSON

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""Seconds for which the end of a recording waits for the list of models."""

LARGEST_LIST = 2**20
"""Bytes of a list of models from which on it is not read."""

UNAUTHORIZED = (401, 403)


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: tuple[_Model, ...] = ()


@dataclass
class Sources:
    """The sources of the models of one server."""

    _models: dict[str, _Model] = field(default_factory=dict)
    _lookup: asyncio.Task[None] | None = None
    _is_over: bool = False

    def of(self, model: str) -> str | None:
        """Return the folder or the id of a model, and of an adapter that of its model; None if it is not known."""
        found = self._models.get(model)
        parent = self._models.get(found.parent or "") if found else None
        chosen = parent or found
        return chosen.root if chosen else None

    def look_up(self, session: ClientSession, url: URL, authorization: str | None) -> None:
        """Begin to read the list of models at a URL, once; again if a client had no right to it."""
        if not self._is_over and (self._lookup is None or self._lookup.done()):
            self._lookup = asyncio.create_task(self._read(session, url, authorization))

    def when_known(self, action: Callable[[], None]) -> None:
        """Do something now, or after a list that is being read has come or failed to."""
        if self._lookup is None or self._lookup.done():
            action()
        else:
            self._lookup.add_done_callback(lambda _: action())

    async def close(self) -> None:
        """Give up reading, and let all that waits for it happen."""
        if self._lookup is not None:
            self._lookup.cancel()
            await asyncio.wait([self._lookup])

    async def _read(self, session: ClientSession, url: URL, authorization: str | None) -> None:
        headers = {hdrs.ACCEPT_ENCODING: "identity"}
        if authorization is not None:
            headers[hdrs.AUTHORIZATION] = authorization
        limit = ClientTimeout(total=SECONDS)
        try:
            async with session.get(url, headers=headers, timeout=limit, allow_redirects=False) as answer:
                self._is_over = answer.status not in UNAUTHORIZED
                listed = b""
                async for data in answer.content.iter_any():
                    listed += data
                    if len(listed) > LARGEST_LIST:
                        break
            self._models = {model.id: model for model in msgspec.json.decode(listed, type=_Models).data}
        except (ClientError, OSError, *NO_JSON) as error:
            logger.info(
                "%s gives no list of models, so recordings do not say where theirs is: %s", url, named_error(error)
            )
