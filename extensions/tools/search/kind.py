"""The file search as a kind of tool: what the stages know of it."""

from __future__ import annotations

from collections.abc import Collection

from penstock.pipeline.frames import CallData, FileSearchOpened, FileSearchResults
from penstock.pipeline.hosted_kinds import HostedKind
from penstock.pipeline.protocol.items import FileSearchCall
from penstock.pipeline.protocol.params.request import RESULTS
from penstock.pipeline.protocol.tools import FunctionTool
from penstock.stages.models.file_searches import queries_in

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
    option="--store",
    shown=_shown,
    cited=FileSearchCall,
)
