"""The fields of requests that Codex sends by default, or is made to send by a setting, in a whole session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.client_server import CODEX_EXEC
from tests.support.launched_agents import Launched, agent_server, call, paths

Json = dict[str, Any]

SEARCH = """{context_size = "high", allowed_domains = ["example.com"], location = {country = "FR", city = "Paris"}}"""
FIELDS: Mapping[str, Mapping[str, str]] = {
    "include": {},
    "previous_response_id": {},
    "prompt_cache_key": {},
    "tools.tools.parameters.type": {},
    "reasoning.effort": {"model_reasoning_effort": '"high"'},
    "reasoning.summary": {"model_reasoning_summary": '"detailed"'},
    "service_tier": {"service_tier": '"priority"'},
    "text.verbosity": {"model_verbosity": '"low"'},
    "tools.external_web_access": {"web_search": '"live"'},
    "tools.filters.allowed_domains": {"tools.web_search": SEARCH},
    "tools.search_context_size": {"tools.web_search": SEARCH},
    "tools.user_location.city": {"tools.web_search": SEARCH},
}
"""The settings by the path of the field in a request."""

OF_MODEL: Json = {
    "support_verbosity": True,
    "service_tiers": [{"id": "priority", "name": "Fast", "description": "As fast as any."}],
}
"""The parameters in the description of a model; Codex leaves out those that are not there."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def test_session_goes_on_with_each_field(penstock: str, agent: Launched, tmp_path: Path) -> None:
    schema, catalog = tmp_path / "schema.json", tmp_path / "models.json"
    schema.write_text(json.dumps(SCHEMA))
    with agent_server(penstock, tmp_path, "--web-search=searxng=http://127.0.0.1:9") as server:
        codex = replace(agent, url=server.url)
        codex.printed("exec")  # it writes the description of the model
        [written] = (tmp_path / "home" / ".cache" / "penstock").iterdir()
        [model] = json.loads(written.read_text())["models"]
        catalog.write_text(json.dumps({"models": [model | OF_MODEL]}))
        settings = {name: value for each in FIELDS.values() for name, value in each.items()}
        settings["model_catalog_json"] = json.dumps(str(catalog))
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        order = call("exec_command", cmd="printf hello > hello.txt")
        for more, prompt in (
            (("--output-schema", str(schema)), f'{order}\nsay {{"a": "x"}}'),
            (("resume", "--last"), "say Bye."),
        ):
            events = codex.run(*CODEX_EXEC, *options, *more, prompt).lines
            [answer] = [
                event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"
            ]
            assert (answer, events[-1]["type"]) == (prompt.rpartition("say ")[2], "turn.completed")
        server.turns(5)  # with the two that only warm a cache
        bodies = [json.loads(file.read_text()) for file in server.recorded.glob("*/request.json")]
        log = server.log.read_text()
    assert (codex.project / "hello.txt").read_text() == "hello"
    found = {path for body in bodies for path in paths(body)}
    assert {*FIELDS, "text.format.schema.type"} - found == set()
    assert log.count("WebSocket /v1/responses: completed") == len(bodies)
