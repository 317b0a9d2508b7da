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
    """A name for people."""
    description: Unused = None
    file_ids: _FileIds | None = None
    """Stored files to put in at once."""
    metadata: Metadata | None = None
    """Up to 16 texts by name, for the client."""
    expires_after: ExpiresAfter | None = None
    """The days without use after which the store expires."""
    chunking_strategy: ChunkingStrategy | None = None
    """The size of the chunks of these files, in tokens."""


class UpdateVectorStore(Body):
    """Changes of a vector store: what is left out stays as it is."""

    name: _Name | None = None
    """A new name for people."""
    metadata: Metadata | None = None
    """New texts by name, in place of the old ones."""
    expires_after: ExpiresAfter | None = None
    """The days without use after which the store expires."""


class AddFile(Body):
    """A file to put into a vector store."""

    file_id: _FileId
    """The id of a stored file."""
    attributes: Attributes | None = None
    """Values by name, by which searches can filter."""
    chunking_strategy: ChunkingStrategy | None = None
    """The size of the chunks of this file, in tokens."""


class UpdateFile(Body):
    """New attributes of a file; null removes them."""

    attributes: Attributes | None
    """Values by name, in place of the old ones."""


class AddBatch(Body):
    """Files to put into a vector store: all with the same attributes and chunking, or each with its own."""

    file_ids: _FileIds | None = None
    """Ids of stored files that share attributes and chunking."""
    files: Annotated[list[AddFile], Field(fail_fast=True), at_most(MOST_ADDED, "files")] | None = None
    """Stored files, each with attributes and chunking of its own, in place of ``file_ids``."""
    attributes: Attributes | None = None
    """Values by name of all ``file_ids``."""
    chunking_strategy: ChunkingStrategy | None = None
    """The size of the chunks of all ``file_ids``, in tokens."""

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
    """One text to look for, or several, any of which may fit."""
    filters: Filters | None = None
    """Conditions on the attributes of files."""
    max_num_results: MaxResults | None = None
    """The most chunks to return."""
    ranking_options: RankingOptions | None = None
    """The least score of a chunk, and how words and meaning weigh."""
    rewrite_query: Refused = None

    @property
    def queries(self) -> list[str]:
        """The queries as a list."""
        return [self.query] if isinstance(self.query, str) else self.query
