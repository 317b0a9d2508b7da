"""The conftest of OGX's tests, in place of their own: a client of a server that runs, and stand-ins for OGX's modules.

``SERVER_URL`` is the server.  Its key is ``ALICE_TOKEN``, which the tests themselves know.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest
import requests
from requests.structures import CaseInsensitiveDict

URL = os.environ["SERVER_URL"]
KEY = os.environ["ALICE_TOKEN"]

MODEL = "searching"
PROVIDER = "sqlite-vec"
"""A search of OGX that has filters and all kinds of ranking."""

REPLACED = ("ogx", "ogx_api", "ogx_client", "langchain_openai")
"""Packages that OGX's tests import, by the first part of their names."""


class OpenAIFilePurpose(StrEnum):
    """The purpose for which the tests upload files."""

    ASSISTANTS = "assistants"


class Filter(SimpleNamespace):
    """A filter of a search, by comparing or of other filters."""

    def model_dump(self) -> dict[str, Any]:
        inner = [each.model_dump() for each in getattr(self, "filters", ())]
        return vars(self) | ({"filters": inner} if inner else {})


KNOWN = {
    "BadRequestError": openai.BadRequestError,
    "ComparisonFilter": Filter,
    "CompoundFilter": Filter,
    "OpenAIFilePurpose": OpenAIFilePurpose,
    "generate_chunk_id": lambda document, text: f"{document}-{hash(text)}",
    "get_logger": lambda name, **_: logging.getLogger(name),
    "get_test_context": lambda: "",
}
"""The parts of OGX that its tests use; all else is a class of objects with any fields, of which none is made."""


class StandIn(ModuleType):
    """A module with any name in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return KNOWN.get(name) or type(name, (SimpleNamespace,), {})


class Finder(MetaPathFinder, Loader):
    """Find these packages and all of their modules."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in REPLACED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())


@dataclass
class Extended:
    """A part of OpenAI's client with something changed."""

    original: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class Files(Extended):
    """The files of OGX's client, which takes the expiration as JSON too."""

    def create(self, *, expires_after: Any = openai.omit, **fields: Any) -> Any:
        expires = json.loads(expires_after) if isinstance(expires_after, str) else expires_after
        return self.original.create(expires_after=expires, **fields)


class VectorStoreFiles(Extended):
    """The files in vector stores of OGX, which answers once a file is read."""

    def create(self, vector_store_id: str, *, file_id: str, **fields: Any) -> Any:
        return self.original.create_and_poll(file_id, vector_store_id=vector_store_id, **fields)


WEIGHTS = {"vector": (1, 0), "keyword": (0, 1), "hybrid": (1, 1)}
"""The weights of meaning and words by OGX's name of the search."""


class VectorStores(Extended):
    """The vector stores of OGX, whose searches have a mode."""

    @property
    def files(self) -> VectorStoreFiles:
        return VectorStoreFiles(self.original.files)

    def search(self, vector_store_id: str, *, search_mode: str = "", **fields: Any) -> Any:
        if search_mode:
            meaning, words = WEIGHTS[search_mode]
            hybrid = {"embedding_weight": meaning, "text_weight": words}
            fields["ranking_options"] = {"hybrid_search": hybrid, **fields.get("ranking_options", {})}
        return self.original.search(vector_store_id, **fields)


@dataclass
class VectorIO:
    """OGX's own way to fill a vector store with chunks, each of which becomes a file, and to search in it."""

    stores: Any

    def insert(self, vector_store_id: str, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            self.stores.files.upload_and_poll(
                vector_store_id=vector_store_id,
                file=(f"{chunk.chunk_id}.txt", chunk.content.encode()),
                attributes=chunk.metadata,
                poll_interval_ms=20,
            )

    def query(self, vector_store_id: str, query: str, params: Mapping[str, Any] = MappingProxyType({})) -> Any:
        found = self.stores.search(
            vector_store_id,
            query=query,
            filters=params.get("filters") or openai.omit,
            max_num_results=params.get("max_chunks", openai.omit),
        )
        chunks = [SimpleNamespace(content=hit.content[0].text, metadata=hit.attributes) for hit in found]
        return SimpleNamespace(chunks=chunks)


def extended(client: openai.OpenAI) -> openai.OpenAI:
    """Give a client what OGX's has besides, with the parts of OGX for which tests ask."""
    kinds = {"vector_io": "inline::sqlite-vec", "files": "inline::localfs", "inference": "remote::vllm"}
    parts = [SimpleNamespace(api=api, provider_type=kind, provider_id=PROVIDER) for api, kind in kinds.items()]
    model = SimpleNamespace(id=MODEL, custom_metadata={"provider_id": PROVIDER})
    vars(client).update(
        files=Files(client.files),
        models=SimpleNamespace(list=lambda: SimpleNamespace(data=[model])),
        providers=SimpleNamespace(list=lambda: parts),
        vector_io=VectorIO(client.vector_stores),
        vector_stores=VectorStores(client.vector_stores),
    )
    return client


def vector_provider_wrapper(test: Any) -> Any:
    """Mark a test of OGX that runs with each of its searches."""
    return test


@pytest.fixture(autouse=True, scope="session")
def key_of_bare_requests() -> Generator[None, None, None]:
    """Send the key with requests that have no client."""
    with pytest.MonkeyPatch.context() as patch:
        headers = CaseInsensitiveDict({**requests.utils.default_headers(), "Authorization": f"Bearer {KEY}"})
        patch.setattr(requests.sessions, "default_headers", headers.copy)
        yield


@pytest.fixture(scope="session")
def openai_client() -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        yield extended(client)


@pytest.fixture
def compat_client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


@pytest.fixture
def responses_client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


@pytest.fixture(scope="session")
def client_with_models(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


class OgxClient(Extended):
    """The same client, whose base URL has no version."""

    base_url = URL


@pytest.fixture(scope="session")
def ogx_client(openai_client: openai.OpenAI) -> OgxClient:
    return OgxClient(openai_client)


@pytest.fixture(scope="session")
def require_server() -> None:
    """Let tests run that need a server."""


@pytest.fixture(scope="session")
def vector_io_provider_id() -> str:
    return PROVIDER


@pytest.fixture(scope="session")
def text_model_id() -> str:
    return MODEL


@pytest.fixture(scope="session")
def embedding_model_id(openai_client: openai.OpenAI) -> str:
    return "words"


@pytest.fixture(scope="session")
def embedding_dimension() -> int:
    return 256
