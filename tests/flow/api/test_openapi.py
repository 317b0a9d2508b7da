from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from penstock.api.http.auth import OPEN
from penstock.pipeline.protocol.params.request import CreateResponse
from tests.support.openapi import Description
from tests.support.paths import ROOT
from tests.support.server import BASES, CALL, WEATHER, ScriptedServer, script

README = (ROOT / "docs" / "ROUTES.md").read_text()


@pytest.fixture
async def description(served: ScriptedServer) -> Description:
    status, document = await served.get("/openapi.json")
    assert status == 200
    return Description(document)


def references(value: Any) -> set[str]:
    """All targets of ``$ref`` and of discriminator mappings."""
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    here = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return here.union(value.get("mapping", {}).values(), *map(references, value.values()))


async def test_every_schema_is_valid(description: Description) -> None:
    assert description.document["openapi"] == "3.1.0"
    schemas = description.document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert references(description.document) <= {f"#/components/schemas/{name}" for name in schemas}


async def test_every_route_is_described_and_no_other(served: ScriptedServer, description: Description) -> None:
    described = {(method, path) for method, path, _ in description.operations}
    app = served.api.app(1000)
    routed = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    others = {
        ("GET", "/"),
        ("GET", "/live"),
        ("GET", "/usage"),
        ("GET", "/metrics"),
        *(("GET", f"{base}/responses") for base in BASES),
    }
    assert described == {(method, path) for method, path in routed if method != "HEAD"} - others
    for _, path, operation in description.operations:
        assert operation["summary"]
        assert {"500"} < set(operation["responses"])
        assert ("401" in operation["responses"]) is ("security" in operation) is (path not in OPEN)
        named = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
        assert all(each["description"].endswith(".") for each in operation["parameters"] if each["in"] == "query")
        assert named == [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    names = [operation["operationId"] for _, _, operation in description.operations]
    assert len(set(names)) == len(names)


async def test_limits_of_bodies_are_described_where_there_is_a_body(description: Description) -> None:
    for _, path, operation in description.operations:
        assert ({"408", "413"} <= set(operation["responses"])) is ("requestBody" in operation), path


async def test_readme_names_every_route(description: Description) -> None:
    for method, path, _ in description.operations:
        shown = path.replace("/openresponses/", "/").replace("{model}", "{name}")
        shown = shown.replace("{response_id}", "{id}").replace("{conversation_id}", "{id}")
        assert any(f"`{method} {shown}`" in line for line in README.splitlines()), (method, path)


async def test_every_parameter_is_described(description: Description) -> None:
    (body,) = description.operation("POST", "/v1/responses")["requestBody"]["content"].values()
    assert set(description.resolved(body["schema"])["properties"]) == set(CreateResponse.model_fields)


async def test_answers_match_their_schemas(served: ScriptedServer, description: Description) -> None:
    served.engine.script = script(CALL)
    for base in ("/v1", "/openresponses/v1"):
        answers = description.operation("POST", f"{base}/responses")["responses"]["200"]["content"]
        _, answer = await served.post({"input": "Hi", "tools": [WEATHER]}, f"{base}/responses")
        description.check(answer, answers["application/json"]["schema"])
        stream = await served.stream({"input": "Hi", "tools": [WEATHER]}, f"{base}/responses")
        for frame in stream.decode().split("\n\n")[:-2]:
            description.check(json.loads(frame.partition("data: ")[2]), answers["text/event-stream"]["schema"])


async def test_schema_requires_every_field(served: ScriptedServer, description: Description) -> None:
    _, answer = await served.post({"input": "Hi"})
    schema = {"$ref": "#/components/schemas/Response"}
    for name in ("usage", "error", "completed_at", "object", "output", "metadata"):
        with pytest.raises(jsonschema.ValidationError):
            description.check({key: value for key, value in answer.items() if key != name}, schema)
