"""What a line of the audit log says a request does, by its route."""

from __future__ import annotations

import json
import logging

import pytest

from penstock.extensions.audit.records import action_of, ids_of, line_of_decision, line_of_request

ACTIONS = {
    "POST /v1/responses": ("create", "responses"),
    "GET /v1/responses/{response_id}": ("read", "responses"),
    "HEAD /v1/responses/{response_id}/input_items": ("list", "responses/input_items"),
    "DELETE /openresponses/v1/responses/{response_id}": ("delete", "responses"),
    "POST /v1/responses/{response_id}/cancel": ("cancel", "responses"),
    "POST /v1/responses/compact": ("create", "responses"),
    "POST /v1/responses/input_tokens": ("count", "responses"),
    "POST /v1/chat/completions": ("create", "chat/completions"),
    "POST /v1/chat/completions/{completion_id}": ("update", "chat/completions"),
    "GET /v1/chat/completions": ("list", "chat/completions"),
    "POST /v1/messages/count_tokens": ("count", "messages"),
    "GET /v1/messages/batches/{batch_id}/results": ("read", "messages/batches"),
    "GET /v1/files/{file_id}/content": ("read", "files"),
    "GET /v1/vector_stores/{vector_store_id}/files/{file_id}": ("read", "vector_stores/files"),
    "POST /v1/vector_stores/{vector_store_id}/search": ("search", "vector_stores"),
    "POST /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}/cancel": ("cancel", "vector_stores/file_batches"),
    "POST /v1/uploads/{upload_id}/complete": ("complete", "uploads"),
    "GET /": ("list", "/"),
    "POST /tokenize": ("create", "tokenize"),
    "BREW /v1/files": ("other", "files"),
    "GET unknown": ("list", "unknown"),
}


@pytest.mark.parametrize("request_line", ACTIONS)
def test_route_says_what_is_done_to_which_kind(request_line: str) -> None:
    assert action_of(*request_line.split()) == ACTIONS[request_line]


def test_ids_are_those_of_the_path_after_any_prefix() -> None:
    route = "/v1/vector_stores/{vector_store_id}/files/{file_id}/content"
    expected = {"vector_store_id": "vs_1", "file_id": "file-2"}
    for prefix in ("", "/llm", "/a/b"):
        assert ids_of(route, f"{prefix}/v1/vector_stores/vs_1/files/file-2/content") == expected
    assert ids_of("/v1/files/{file_id}", "/v1/files/" + "x" * 500) == {"file_id": "x" * 100}
    assert ids_of("unknown", "/v1/nothing") == {}


FACTS = ["a\ud800", "b\udcff\n{}", 10**5000, -(2**64), 2**63, float("inf"), ["c"], b"d", True]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: type(fact).__name__)
def test_any_fact_of_a_stage_makes_one_line(fact: object) -> None:
    record = logging.makeLogRecord({"audit": {"rule": "r", "subject": fact, "fact": fact}})
    line = line_of_decision(record)
    assert line is not None
    assert line.count(b"\n") == 1
    assert json.loads(line)["rule"] == "r"


def test_any_text_of_a_request_makes_one_line() -> None:
    fields = {
        "status": 404,
        "route": "/v1/files/{file_id}",
        "method": "GET",
        "path": "/v1/files/a\udcff",
        "model": "\ud800",
    }
    line = line_of_request(logging.makeLogRecord(fields))
    assert line is not None
    assert (json.loads(line)["file_id"], json.loads(line)["model"]) == ("a?", "?")
