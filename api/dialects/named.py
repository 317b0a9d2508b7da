"""The dialects that a server speaks: the one of OpenAI, and those that come in through the door."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from aiohttp import hdrs, web

from penstock.api.dialect import Dialect, Edge
from penstock.api.dialects.responses.dialect import RESPONSES
from penstock.api.http.conventions import SpokenByRoute
from penstock.api.http.openapi import Operation, describe
from penstock.api.open_sockets import OpenSockets
from penstock.api.peers import Peers
from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline.plugins import DIALECTS, WrongPlugin, described, value_named
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.responses import recorded_responses

OPTION = "--dialect"

SHIPPED = ("chat", "completions", "decisions", "messages", "open_responses")
"""The entry points of the dialects that penstock brings along, besides that of OpenAI."""


def spoken(names: Sequence[str] = ()) -> tuple[Dialect, ...]:
    """Return the dialects of a server, those of the operator last.

    Raises `WrongPlugin` for a name that stands for no dialect, for a dialect that breaks a rule of its routes, and for
    two with the same name or the same route.
    """
    dialects = [RESPONSES, *(value_named(name, OPTION, DIALECTS, Dialect) for name in SHIPPED)]
    taken = {_place(route) for dialect in dialects for route in rehearsed_routes(dialect)} if names else set()
    for name in names:
        dialect = value_named(name, OPTION, DIALECTS, Dialect)
        try:
            routes = rehearsed_routes(dialect)
            problem = next(problems(dialect, routes), None)
        except Exception as error:
            raise WrongPlugin(name, described(error, "its routes raised "), OPTION) from error
        if problem:
            raise WrongPlugin(name, problem, OPTION)
        if dialect.name in (other.name for other in dialects):
            raise WrongPlugin(name, f"there is a dialect {dialect.name!r} already", OPTION)
        places = {_place(route) for route in routes}
        if both := sorted(taken & places):
            raise WrongPlugin(name, f"another dialect has its route {' '.join(both[0])} already", OPTION)
        taken |= places
        dialects.append(dialect)
    return tuple(dialects)


def spoken_by_route(dialects: Sequence[Dialect]) -> SpokenByRoute:
    """Return the dialects by the routes that they will have."""
    by_route = SpokenByRoute()
    for dialect in dialects:
        by_route.add(dialect.spoken_on(rehearsed_routes(dialect)), ())
    return by_route


def named(name: str, option: str) -> Dialect:
    """Return the dialect of penstock's with a name, or else that which an ``option`` names.

    Raises `WrongPlugin`.
    """
    dialects = {dialect.name: dialect for dialect in spoken()}
    return dialects.get(name) or value_named(name, option, DIALECTS, Dialect)


def problems(dialect: Dialect, routes: Sequence[web.RouteDef]) -> Iterator[str]:
    """Yield what is wrong with a dialect and its rehearsed routes, each with the cure."""
    if not re.fullmatch(r"(/[A-Za-z0-9_.~-]+)+", dialect.base):
        yield f"its base URL is {dialect.base!r}: begin it with a slash, and end it without one"
    if not routes:
        yield "it has no routes"
    for route in routes:
        method, path = _place(route)
        operation: Operation | None = getattr(route.handler, "operation", None)
        if not path.startswith(f"{dialect.base}/"):
            yield f"its route {method} {path} is not under its base URL {dialect.base}"
        if operation is None and method not in (hdrs.METH_GET, hdrs.METH_HEAD):
            yield f"its route {method} {path} is no operation: decorate its handler with `operation`"
        if operation is not None and not route.handler.__doc__:
            yield f"its route {method} {path} has no docstring, which describes it"
    describe(routes, {route.path: (dialect.wire, dialect.conventions) for route in routes})


def rehearsed_routes(dialect: Dialect) -> Sequence[web.RouteDef]:
    """Return the routes of a dialect over a pipeline without a model."""
    pipeline = recorded_responses()
    runs = pipeline.stage("persist").runs
    scheduler = Scheduler(pipeline, ScriptedEngine(models=("recorded",)), runs, runs.store)
    return dialect.routes(Edge(dialect, scheduler, Peers(), OpenSockets(), keep_alive=15.0))


def _place(route: web.RouteDef) -> tuple[str, str]:
    return route.method, route.path
