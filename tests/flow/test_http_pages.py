"""The pages of the HTTP API: each route has its parameters, and requests that get the answers shown."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel

from docs.site.http_api import MIRRORED, Api, described, handlers_of, pages, shown
from docs.site.http_examples import GROUPS, Group
from docs.site.http_run import ADDRESS, Names, Ran, Request, answer_to, example_server, sent
from docs.site.meanings import is_refused, is_unused, meanings
from penstock.api.http.openapi import Operation
from tests.support.openapi import Description

VALUES = {"--connect", "--header", "--wait", "--execute", "-X", "-H", "-d", "-F"}
"""Options of the commands that take a value."""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Api:
    return asyncio.run(described(tmp_path_factory.mktemp("first")))


@pytest.fixture(scope="module")
def written(api: Api) -> dict[str, str]:
    return dict(pages(api))


def request_of(command: str) -> Request:
    """Read the line of a shell, as the shell and the program read it."""
    words = iter(shlex.split(command.replace("\\\n", "")))
    given: dict[str, list[str]] = {}
    for word in words:
        given.setdefault(word if word in VALUES else "", []).append(next(words) if word in VALUES else word)
    upgrades = given[""][0] == "npx"
    url = given["--connect"][0].replace("ws", "http", 1) if upgrades else given[""][1]
    body = "".join(given.get("-d", given.get("--execute", ())))
    form = dict(part.split("=", 1) for part in given.get("-F", ()))
    method = "".join(given.get("-X", ())) or ("POST" if form or (body and not upgrades) else "GET")
    headers = dict(each.split(": ", 1) for each in given.get("-H", given.get("--header", ())))
    return Request(method, url.removeprefix(ADDRESS), headers, body, form, upgrades=upgrades)


async def test_each_route_has_an_example(api: Api, tmp_path: Path) -> None:
    async with example_server(tmp_path) as server:
        routes = handlers_of(server.app)
        paths = {(each.method, each.resource.canonical) for each in server.app.router.routes() if each.resource}
    assert {example.route for group in GROUPS for example in group.examples} == set(routes)
    mirrored = {f"{method} {path.removeprefix(MIRRORED)}" for method, path in paths if path.startswith(MIRRORED)}
    assert {route for route in mirrored if not route.startswith("HEAD")} < set(routes)


async def test_commands_of_the_pages_get_their_answers(api: Api, tmp_path: Path) -> None:
    """The commands run once more, on a server with other ids and at another time."""
    names = Names()
    async with example_server(tmp_path) as server:
        for ran in api.ran:
            given = request_of(names.drawn(ran.request.command))
            status, kind, text = await answer_to(ran.example, given, server)
            again = Ran(ran.example, ran.request, status, kind, names.stable(text))
            assert (status, kind, shown(again)) == (ran.status, ran.kind, shown(ran)), ran.example.route


async def test_requests_have_a_key_where_one_is_needed(api: Api, tmp_path: Path) -> None:
    async with example_server(tmp_path) as server:
        for ran in api.ran:
            keyless = Request(ran.request.method, ran.request.path, {"Content-Type": "application/json"}, "{}")
            status, _, _ = await sent(server, keyless)
            assert (status == 401) is bool(ran.example.key), ran.example.route


def test_answers_fit_their_schemas(api: Api) -> None:
    document = Description(api.document)
    for ran in api.ran:
        answers = api.schema(ran.example.route).get("responses", {})
        schema = answers.get(str(ran.status), {}).get("content", {}).get(ran.kind, {}).get("schema")
        if ran.kind == "application/json" and schema:
            document.check(json.loads(ran.answer), schema)


def section(page: str, route: str) -> str:
    (found,) = [part for part in page.split("\n## ")[1:] if part.replace("<wbr>", "").startswith(f"{route}\n")]
    return found


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_page_has_what_its_routes_take(group: Group, api: Api, written: dict[str, str]) -> None:
    page, others = written[group.file], "".join(written.values())
    examples = [ran for ran in api.ran if ran.example in group.examples]
    for ran in examples:
        language, text = shown(ran)
        assert f"```sh\n{ran.request.command}\n```" in page
        assert f"````{language}\n{text}\n````" in page
        here = section(others, ran.example.route)
        rows = re.findall(r"^\| `(\w+)`", here, re.MULTILINE)
        operation: Operation | None = api.operation(ran.example.route)
        assert set(re.findall(r"{(\w+)}", ran.example.path)) <= set(rows)
        if operation:
            assert {each.name for each in operation.query} <= set(rows)
            assert all(
                f"| {status} |" in here
                for status in {*operation.statuses, *(each.status for each in operation.refusals)}
            )
            assert all(fields_of(model) <= fields_said(here, others) for model in operation.bodies.values())


def fields_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def fields_said(here: str, pages: str) -> set[str]:
    """Return the names in the tables and lists of a route, and in those that it refers to."""
    referred = [section(pages, route) for route in re.findall(r"that of \[([^\]]+)\]", here)]
    return {name for text in (here, *referred) for name in re.findall(r"`(\w+)`", text)}


def test_each_field_of_a_body_has_a_meaning(api: Api) -> None:
    models = {
        model for route in api.handlers if (described := api.operation(route)) for model in described.bodies.values()
    }
    assert len(models) > 20
    for model in models:
        said = meanings(model)
        named = {name for name, each in model.model_fields.items() if not is_refused(each) and not is_unused(each)}
        assert said.keys() == named
        assert all(text.endswith((".", ")")) for text in said.values()), said


def test_field_without_a_meaning_is_named() -> None:
    class Body(BaseModel):
        name: str
        """A name."""
        size: int

    with pytest.raises(LookupError, match=r"Body does not say what these mean: size$"):
        meanings(Body)


def test_ids_and_times_are_stable() -> None:
    names, drawn = Names(), f"resp_{'0a' * 16}"
    text = f'{{"id": "{drawn}", "item": "msg_{"0a" * 16}i0000", "created_at": 1795900000, "at": 0.0123, "n": 17}}'
    stable = '{"id": "resp_1", "item": "msg_1", "created_at": 1800000000, "at": 0.5, "n": 17}'
    assert names.stable(text) == stable
    assert names.stable(f"resp_{'0b' * 16} {drawn}") == "resp_2 resp_1"
    assert names.drawn("/v1/responses/resp_1") == f"/v1/responses/{drawn}"
