"""The file search as a kind of tool: what the stages know of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from penstock.extensions.tools.search.queries import queries_in
from penstock.pipeline.frames import CallData, FileSearchOpened, FileSearchResults
from penstock.pipeline.hosted_kinds import HostedKind, ToolOptions
from penstock.pipeline.protocol.items import FileSearchCall
from penstock.pipeline.protocol.params.file_search import HybridWeights, RankingOptions
from penstock.pipeline.protocol.params.request import RESULTS
from penstock.pipeline.protocol.params.tools import FileSearchToolParam, ToolParam
from penstock.pipeline.protocol.tools import FunctionTool


class FileSearchOptions(ToolOptions, frozen=True, omit_defaults=True):
    """The options of a file search."""

    stores: tuple[str, ...] = ()
    """The ids of the vector stores."""
    most: int = 20
    """The most results of one call."""
    filters: dict[str, Any] | None = None
    """A condition on the attributes of the files, in the form of the API."""
    score_threshold: float = 0.0
    """Results with a lower score are left out."""
    embedding_weight: float = 1.0
    text_weight: float = 1.0
    """The weights of both rankings, by meaning and by words, where they are fused."""


def _read(tool: ToolParam, path: str, *, by_mcp: bool) -> FileSearchOptions | None:
    if not isinstance(tool, FileSearchToolParam):
        return None
    ranking = tool.ranking_options or RankingOptions()
    hybrid = ranking.hybrid_search or HybridWeights(embedding_weight=1.0, text_weight=1.0)
    return FileSearchOptions(
        tuple(tool.vector_store_ids),
        most=tool.max_num_results or FileSearchOptions().most,
        filters=None if tool.filters is None else tool.filters.form,
        score_threshold=ranking.score_threshold or 0.0,
        embedding_weight=hybrid.embedding_weight,
        text_weight=hybrid.text_weight,
        path=path,
    )


_DESCRIPTION = (
    "Tool for searching in the files of the user.\n"
    "A search returns parts of files. Each begins with a line such as `[1000] report.pdf`.\n"
    "Cite a part after what you take from it, as `【1000†L1】`: its number, and a line of it."
)
_SEARCH = FunctionTool(
    "search",
    "Finds the parts of the files that fit any of the queries.",
    {
        "type": "object",
        "properties": {
            "queries": {
                "type": "array",
                "items": {"type": "string"},
                "description": "One to five queries: the words that the parts should have, or a question.",
            }
        },
        "required": ["queries"],
    },
)


def _called(name: str, text: str, suffix: str) -> FileSearchCall:
    return FileSearchCall(FileSearchCall.new_id(suffix), queries_in(text), "incomplete")


def _shown(data: CallData, include: Collection[str]) -> CallData | None:
    """Return the results only if the request includes them."""
    match data:
        case FileSearchResults(queries) if RESULTS not in include:
            return FileSearchResults(queries, None)
        case _:
            return data


FILE_SEARCH = HostedKind(
    namespace="file_search",
    api_type="file_search",
    description=_DESCRIPTION,
    functions=(_SEARCH,),
    opened=lambda _: FileSearchOpened(),
    called=_called,
    read=_read,
    option="--store",
    shown=_shown,
    cites=True,
)
