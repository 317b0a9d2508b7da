"""The embedder: requests to the server of ``--embeddings`` for the vectors of texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from numpy.typing import NDArray

from penstock.extensions.tools.search.ranking import unit
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.pipeline.tasks import in_thread
from penstock.services.foreign import Unreadable, read_whole

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Texts of one request."""

SECONDS = 60.0
"""Seconds in which the other server has to answer."""

MOST_NUMBERS = 8_192
"""Numbers of a vector."""

LONGEST_NUMBER = 26
"""Bytes of a number of an answer, with what stands around it."""

AROUND = 1 << 16
"""Bytes of an answer besides the numbers of its vectors."""

LARGEST_LIST = 1 << 20
"""Bytes of the list of models."""


class NotEmbedded(Exception):
    """The other server gave no vectors; the message says why."""


class _Vector(msgspec.Struct):
    index: int
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Vector]


class _Models(msgspec.Struct):
    class _Model(msgspec.Struct):
        id: str

    data: list[_Model]


class Embedder:
    """The server at ``url``, with the API ``key`` that it wants, if any; its first model embeds."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = ""
        self._dimensions = 0
        self._session: ClientSession | None = None

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of some texts, each with the length 1; raises `NotEmbedded`."""
        parts = [await self._some(texts[at : at + AT_ONCE]) for at in range(0, len(texts), AT_ONCE)]
        if len({part.shape[1] for part in parts}) > 1:
            raise NotEmbedded("Its vectors are of different lengths.")
        return np.concatenate(parts)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _some(self, texts: Sequence[str]) -> NDArray[np.float32]:
        body = msgspec.json.encode({"model": await self._name(), "input": texts, "encoding_format": "float"})
        answer = await self._asked("POST", "/v1/embeddings", self._largest(len(texts)), body)
        vectors = await in_thread(_vectors, answer, len(texts))
        self._dimensions = vectors.shape[1]
        return vectors

    def _largest(self, texts: int) -> int:
        """Return the most bytes of an answer with the vectors of some texts, once their dimensions are known."""
        return AROUND + texts * (self._dimensions or MOST_NUMBERS) * LONGEST_NUMBER

    async def _name(self) -> str:
        if not self._model:
            try:
                models = msgspec.json.decode(await self._asked("GET", "/v1/models", LARGEST_LIST), type=_Models)
            except NO_JSON as error:
                raise NotEmbedded("It does not list its models.") from error
            if not models.data:
                raise NotEmbedded("It has no model.")
            self._model = models.data[0].id
        return self._model

    async def _asked(self, method: str, path: str, most: int, body: bytes | None = None) -> bytes:
        if self._session is None:
            self._session = ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=SECONDS))
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, f"{self._url}{path}", data=body, headers=headers, allow_redirects=False
            ) as answer:
                read = await read_whole(answer.content.iter_any(), most)
        except (ClientError, TimeoutError, Unreadable) as error:
            self._dimensions = 0  # another model may answer by now
            raise NotEmbedded(f"It does not answer ({named_error(error)}).") from error
        if answer.status != 200:
            self._model = ""
            raise NotEmbedded(f"It answers with status {answer.status}.")
        return read


def _vectors(answer: bytes, count: int) -> NDArray[np.float32]:
    try:
        read = sorted(msgspec.json.decode(answer, type=_Answer).data, key=lambda vector: vector.index)
    except NO_JSON as error:
        raise NotEmbedded("Its answer has no vectors.") from error
    if len(read) != count or len({len(vector.embedding) for vector in read}) != 1 or not read[0].embedding:
        raise NotEmbedded("Its answer has not one vector for each text.")
    numbers = np.array([vector.embedding for vector in read], np.float64)
    if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
        raise NotEmbedded("Its vectors have numbers that 32 bits cannot hold.")
    return unit(numbers)
