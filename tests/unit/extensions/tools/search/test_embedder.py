"""The embedder holds whatever the other server answers, and tells no one what it was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from penstock.extensions.tools.search import embedder as module
from penstock.extensions.tools.search.embedder import Embedder, NotEmbedded
from penstock.pipeline.foreign_errors import traceback_of
from tests.support.broken_http import BROKEN, answering, sound

KEY = "canary-5ab1"
MODELS = b'{"data": [{"id": "m"}]}'

pytestmark = pytest.mark.io


@asynccontextmanager
async def embedding(*vectors: str) -> AsyncGenerator[Embedder, None]:
    """Yield an embedder, whose server lists its model and then gives these answers."""
    answers = [sound(MODELS), *(sound(each.encode()) for each in vectors)]
    async with answering(*answers) as server:
        embedder = Embedder(server.url, KEY)
        try:
            yield embedder
        finally:
            await embedder.close()


def answer_of(*vectors: list[object]) -> str:
    return json.dumps({"data": [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)]})


@pytest.mark.parametrize("which", BROKEN)
async def test_broken_answer_is_named_without_the_key(which: str) -> None:
    for lists_its_model in (False, True):
        async with answering(*[sound(MODELS)] * lists_its_model, BROKEN[which]) as server:
            embedder = Embedder(server.url, KEY)
            with pytest.raises(NotEmbedded) as refused:
                await embedder.embed(["x"])
            await embedder.close()
        assert KEY not in str(refused.value) + traceback_of(refused.value)


async def test_vectors_are_of_length_one() -> None:
    async with embedding(answer_of([3, 4]), answer_of([1e38, 0])) as embedder:
        assert (await embedder.embed(["x"])).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
        assert (await embedder.embed(["x"])).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("number", ["1e308", "-1e39", "1e400", "NaN", "null", '"x"'])
async def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    async with embedding(answer_of([1, 7]).replace("7", number)) as embedder:
        with pytest.raises(NotEmbedded, match=r"no vectors|32 bits cannot hold"):
            await embedder.embed(["x"])


async def test_deep_answer_is_no_answer() -> None:
    deep = '{"more": ' + "[" * 100_000 + "]" * 100_000 + "}"
    async with answering(sound(deep.encode())) as server:
        embedder = Embedder(server.url, KEY)
        with pytest.raises(NotEmbedded, match="does not list its models"):
            await embedder.embed(["x"])
        await embedder.close()
    async with embedding(deep) as embedder:
        with pytest.raises(NotEmbedded, match=r"no vectors|does not answer"):
            await embedder.embed(["x"])


async def test_answer_is_bounded_by_the_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AROUND", 200)
    long = answer_of([1.0] * 400)
    async with embedding(answer_of([1.0] * 4), long, answer_of([1.0] * 4, [2.0] * 4)) as embedder:
        await embedder.embed(["x"])
        with pytest.raises(NotEmbedded, match="too large: more than 304 bytes"):
            await embedder.embed(["x"])
    monkeypatch.setattr(module, "MOST_NUMBERS", 10)
    async with embedding(long) as embedder:
        with pytest.raises(NotEmbedded, match="too large: more than 460 bytes"):
            await embedder.embed(["x"])
