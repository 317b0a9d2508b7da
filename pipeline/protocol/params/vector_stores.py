"""Request bodies of the vector stores API, as openai-python 3.52 writes them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from penstock.pipeline.protocol.params.common import Body, Metadata, Refused, TextOr, Unused, at_most, one_of
from penstock.pipeline.protocol.params.file_search import Attributes, Filters, MaxResults, RankingOptions

MOST_FILES = 10_000
"""Files of a vector store."""

MOST_ADDED = 2_000
"""Files that one request may put into a vector store."""

MOST_QUERIES = 16
"""Queries of one search."""

MOST_QUERY_CHARACTERS = 32_768
"""Characters of a query."""

_Name: TypeAlias = Annotated[str, StringConstraints(max_length=256)]
_FileId: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_FileIds: TypeAlias = Annotated[list[_FileId], Field(fail_fast=True), at_most(MOST_ADDED, "files")]


class ExpiresAfter(Body):
    """The days after its last use after which a vector store expires."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Field(ge=1, le=365)]


class StaticChunking(Body):
    max_chunk_size_tokens: Annotated[int, Field(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _overlaps_by_half(self) -> StaticChunking:
        if self.chunk_overlap_tokens * 2 > self.max_chunk_size_tokens:
            raise PydanticCustomError("overlap", "The overlap should be at most half of max_chunk_size_tokens")
        return self


class StaticStrategy(Body):
    type: Literal["static"]
    static: StaticChunking


class AutoStrategy(Body):
    type: Literal["auto"]


ChunkingStrategy: TypeAlias = Annotated[
    Annotated[StaticStrategy, Tag("static")] | Annotated[AutoStrategy, Tag("auto")],
    Discriminator(one_of("static", tag="auto")),
]


class CreateVectorStore(Body):
    """A new vector store, with its first files."""

    name: _Name | None = None
    description: Unused = None
    file_ids: _FileIds | None = None
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | None = None
    chunking_strategy: ChunkingStrategy | None = None


class UpdateVectorStore(Body):
    """Changes of a vector store: what is left out stays as it is."""

    name: _Name | None = None
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | None = None


class AddFile(Body):
    """A file to put into a vector store."""

    file_id: _FileId
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class UpdateFile(Body):
    """New attributes of a file; null removes them."""

    attributes: Attributes | None


class AddBatch(Body):
    """Files to put into a vector store: all with the same attributes and chunking, or each with its own."""

    file_ids: _FileIds | None = None
    files: Annotated[list[AddFile], Field(fail_fast=True), at_most(MOST_ADDED, "files")] | None = None
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None

    @model_validator(mode="after")
    def _names_files_once(self) -> AddBatch:
        if bool(self.file_ids) is bool(self.files):
            raise PydanticCustomError(
                "files", "Either file_ids or files should name the files", {"missing": "file_ids"}
            )
        return self

    @property
    def each(self) -> list[AddFile]:
        """The files, each with its attributes and chunking."""
        if self.files:
            return self.files
        return [
            AddFile.model_construct(file_id=name, attributes=self.attributes, chunking_strategy=self.chunking_strategy)
            for name in self.file_ids or ()
        ]


_Query: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=MOST_QUERY_CHARACTERS)]


class SearchVectorStore(Body):
    """A search in one vector store, for any of the queries."""

    query: TextOr[_Query, Annotated[list[_Query], Field(fail_fast=True, min_length=1, max_length=MOST_QUERIES)]]
    filters: Filters | None = None
    max_num_results: MaxResults | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: Refused = None

    @property
    def queries(self) -> list[str]:
        """The queries as a list."""
        return [self.query] if isinstance(self.query, str) else self.query
