"""File search behind a server: calls, events, results, citations, and what a conversation keeps of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from itertools import product
from typing import Any

import pytest
from openai.types.responses import ResponseFileSearchToolCall

from tests.support.server import ScriptedServer
from tests.support.tool_servers import MODES, answer_markup, play_turns, prompts_read, respond
from tests.support.vector_stores import DOCUMENTS, Json, file_search, new_store, search_markup, search_server, uploaded

RESULTS = "file_search_call.results"
CITING = "Two minutes【1000†L2】, it says【9†L1】."
LADDER = [
    "output_item.added",
    "file_search_call.in_progress",
    "file_search_call.searching",
    "file_search_call.completed",
    "output_item.done",
]


@pytest.fixture
async def served(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with search_server(store_at) as served:
        yield served


@pytest.fixture
async def store(served: ScriptedServer) -> str:
    files = [await uploaded(served.store, name, text) for name, text in DOCUMENTS.items()]
    return str((await new_store(served, files))["id"])


@pytest.mark.parametrize("mode", MODES)
async def test_search_is_one_item_whose_results_are_read_and_cited(
    served: ScriptedServer, store: str, mode: str
) -> None:
    play_turns(
        served.engine, search_markup("green tea", "苹果"), answer_markup("Two minutes【1000†L2】, it says【9†L1】.")
    )
    asked = {"tools": [file_search(store, max_num_results=2)], "include": [RESULTS]}
    received = await respond(served, mode, asked)
    assert received.types == ["file_search_call", "message"]
    call, message = received.output
    read = ResponseFileSearchToolCall.model_validate(call, strict=True)
    assert (read.status, read.queries) == ("completed", ["green tea", "苹果"])
    assert [result.filename for result in read.results or ()] == ["tea.md", "水果.txt"]
    assert received.ladder(0) == LADDER
    part = message["content"][0]
    assert part["text"] == "Two minutes, it says【9†L1】."
    assert part["annotations"] == [
        {"type": "file_citation", "file_id": call["results"][0]["file_id"], "filename": "tea.md", "index": 11}
    ]
    first, second = prompts_read(served)
    assert "namespace file_search" in first
    assert "[1000] tea.md (file-" in second
    assert "L2: Green tea is steeped for two minutes." in second


@pytest.mark.parametrize(("included", "results"), [([], None), ([RESULTS], [])])
async def test_search_that_finds_nothing_has_no_results(
    served: ScriptedServer, store: str, included: list[str], results: list[Json] | None
) -> None:
    play_turns(served.engine, search_markup("bicycle"), answer_markup())
    received = await respond(served, "whole", {"tools": [file_search(store)], "include": included})
    assert (received.output[0]["status"], received.output[0]["results"]) == ("completed", results)


async def test_results_are_shown_only_if_they_are_included(served: ScriptedServer, store: str) -> None:
    play_turns(served.engine, search_markup("tea"), answer_markup())
    received = await respond(served, "whole", {"tools": [file_search(store)]})
    assert received.output[0]["results"] is None
    assert received.output[0]["queries"] == ["tea"]


async def test_later_response_cites_what_an_earlier_one_found(served: ScriptedServer, store: str) -> None:
    play_turns(served.engine, search_markup("tea"), answer_markup())
    first = await respond(served, "whole", {"tools": [file_search(store)]})
    play_turns(served.engine, answer_markup("So it is【1000†L0】."))
    again = {"previous_response_id": first.response["id"], "input": "Sure?", "tools": [file_search(store)]}
    received = await respond(served, "stream", again)
    (annotation,) = received.output[0]["content"][0]["annotations"]
    assert (annotation["type"], annotation["filename"], annotation["index"]) == ("file_citation", "tea.md", 8)


async def test_search_of_another_server_is_read_with_its_results(served: ScriptedServer) -> None:
    result = {"file_id": "file-1", "filename": "old.txt", "score": 0.5, "text": "Old news.", "attributes": {}}
    call = {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["news"], "results": [result]}
    items: Json = {"input": [call, {"role": "user", "content": "Well?"}]}
    received = await respond(served, "whole", items)
    assert received.response["status"] == "completed"
    assert "Old news." in served.prompt_text()
    assert '{"queries":["news"]}' in served.prompt_text()


@pytest.mark.parametrize("mode", ["whole", "stream", "background"])
async def test_unknown_vector_store_is_refused_before_the_response(served: ScriptedServer, mode: str) -> None:
    body = {"input": "Hi", "tools": [file_search("vs_none")], **MODES[mode]}
    status, answer = await served.post(body)
    assert (status, answer["error"]["param"]) == (404, "tools[0].vector_store_ids[0]")
    assert served.engine.prompts == []


async def test_choice_of_file_search_makes_the_model_call_it(served: ScriptedServer, store: str) -> None:
    play_turns(served.engine, search_markup("moon"), answer_markup())
    received = await respond(served, "whole", {"tools": [file_search(store)], "tool_choice": {"type": "file_search"}})
    assert received.types == ["file_search_call", "message"]
    assert received.response["tool_choice"] == {"type": "file_search"}


ODD = [
    ("{}", "failed", 'Give the arguments as JSON: {"queries": ["..."]}.'),
    ('{"queries": [1, "", " "]}', "failed", 'Give the arguments as JSON: {"queries": ["..."]}.'),
    ("nonsense{", "completed", "Nothing in the files fits."),
    ("[" * 5_000, "completed", "Nothing in the files fits."),
    ('{"queries": "tea"}', "completed", "Green tea"),
    ('{"query": "tea"}', "completed", "Green tea"),
    ('{"queries": ["\\ud800 tea", "\\u0000"]}', "completed", "Green tea"),
    (json.dumps({"queries": [f"tea {number}" for number in range(9)]}), "completed", "first 5 of 9"),
    (json.dumps({"queries": ["tea " * 5_000]}), "completed", "Green tea"),
]
"""Arguments that a model may write, with the status of the call, and what the model reads."""


async def test_odd_arguments_have_one_clear_output(served: ScriptedServer, store: str) -> None:
    for mode, (arguments, status, output) in product(("whole", "stream"), ODD):
        markup = f"<|channel|>analysis to=file_search.search code<|message|>{arguments}<|call|>"
        play_turns(served.engine, markup, answer_markup())
        received = await respond(served, mode, {"tools": [file_search(store)], "include": [RESULTS]})
        assert received.types == ["file_search_call", "message"], arguments
        assert received.output[0]["status"] == status, arguments
        assert bool(received.output[0]["results"]) is ("tea" in arguments), arguments
        assert output in prompts_read(served)[-1].rpartition("<|call|>")[2], arguments


async def test_filters_of_the_tool_bound_the_model(served: ScriptedServer, store: str) -> None:
    nothing: Any = {"type": "eq", "key": "kind", "value": "none"}
    play_turns(served.engine, search_markup("tea"), answer_markup())
    received = await respond(served, "whole", {"tools": [file_search(store, filters=nothing)], "include": [RESULTS]})
    assert received.output[0]["results"] == []
    assert "Nothing in the files fits." in prompts_read(served)[1]
