"""The command ``penstock serve``: one process, or several frontends."""

from __future__ import annotations

import gc
import json
import logging
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import uvloop

from penstock.api.cli.command_line import read_settings
from penstock.api.cli.drawn import drawn
from penstock.api.cli.mistakes import explained
from penstock.api.dialects.named import spoken, spoken_by_route
from penstock.api.frontends.frontend import run_frontend
from penstock.api.frontends.supervisor import Supervisor
from penstock.api.http.connections import bind, listen
from penstock.api.http.starting import answering
from penstock.api.metrics.scrape import bound_for_metrics
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine, rehearsed
from penstock.api.start.backends import (
    EngineStarter,
    loading,
    model_here,
    planned,
    reason_to_wait,
    start,
    start_shown,
)
from penstock.api.start.parts import UNSTARTABLE, preloaded
from penstock.api.start.serving import ENDED_WITH_ENGINE, drained, serving_requests, signals_raised, stop_signals
from penstock.pipeline.distribution import namesake
from penstock.pipeline.errors import CannotRun, EngineDead
from penstock.pipeline.logs import log_to_stderr
from penstock.pipeline.tasks import wait_at_most
from penstock.server import running
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.recordings.converse import recorded_example

logger = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between two looks at an engine with which the server ends."""


async def serve(settings: Settings, start_engine: EngineStarter = start) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the responses that still run.

    With --exit-with-engine, raise `EngineDead` when the engine has died.

    Until the engine runs, requests are answered with status 503, and ``/ready`` says what the server waits for.
    """
    with (
        bind(settings.host, settings.port) as bound,
        bound_for_metrics(settings.host, settings.metrics_port) as metrics,
    ):
        listen(bound)  # the address is ours alone before the other servers of the store learn it
        port = bound.getsockname()[1]
        while_starting = _answering(bound, settings)
        async with (
            running(settings, start_engine, settings.reached_at(port), while_starting=while_starting) as server,
            serving_requests(settings, server, bound, metrics),
        ):
            example = recorded_example(server.scheduler.pipeline)
            print(greeting(settings, port, server.scheduler.engine.models, example), flush=True)
            stop, hurry = stop_signals()
            engine, look = server.scheduler.engine, LOOK if settings.exit_with_engine else None
            while not stop.is_set() and (look is None or engine.is_alive):
                await wait_at_most(look, stop)
            await drained(settings, server.scheduler, hurry)
    if not stop.is_set():
        raise EngineDead(ENDED_WITH_ENGINE)


def _answering(bound: socket.socket, settings: Settings) -> AbstractContextManager[None]:
    return answering(bound, reason_to_wait(settings), spoken_by_route(spoken(settings.dialect)))


def serve_frontends(settings: Settings) -> None:
    """Serve with several processes until SIGTERM or SIGINT; call it in the main thread."""
    with ExitStack() as closing:
        bound = closing.enter_context(bind(settings.host, settings.port))
        listen(bound)
        supervisor = Supervisor(settings, settings.frontends, run_frontend, bound)
        closing.enter_context(supervisor.prepared())
        is_ours = not settings.engine
        shown = closing.enter_context(loading(settings)) if is_ours else None
        with _answering(bound, settings):
            if is_ours:
                plan, model = planned(settings, process=-1)
                uvloop.run(rehearsed(settings, RunningEngine(ScriptedEngine(models=plan.models), model)))
                closing.enter_context(supervisor.launched(plan))
            else:
                supervisor.start_all()
            up = supervisor.wait()
        if shown:
            shown.finish()
        print(greeting(settings, bound.getsockname()[1], up.models, up.example), flush=True)
        uvloop.run(supervisor.run())


def greeting(settings: Settings, port: int, models: Sequence[str], example: tuple[str, str] | None = None) -> str:
    """Return the message for a server that now listens on ``port``, with a request to try: a model, and its input."""
    model, text = example or (models[0], "Say hello.")
    body = shlex.quote(json.dumps({"model": model, "input": text, "stream": True}))
    page = settings.url(port)
    url = f"{page}/v1"
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.has_keys else ""
    command = f"curl -N {url}/responses{key} -H 'Content-Type: application/json' -d {body}"
    live = f"Its live page: {opened}\n" if (opened := settings.live_page(port)) else ""
    return f"Serving {models[0]} at {url}. Try:\n\n  {command}\n\nor open {page} in a browser.\n{live}"


def _check(settings: Settings, arguments: Sequence[str]) -> None:
    """Raise `CannotRun` for a mistake in what the settings name: the start is not tried again, as it stays."""
    try:
        if beside := namesake():
            logger.warning(beside)
        if here := settings.in_this_process:
            model_here(here)
        preloaded(settings)
    except UNSTARTABLE as error:
        raise CannotRun(explained(error, arguments)) from error


def main(arguments: Sequence[str]) -> None:
    """Serve a model over HTTP."""
    try:
        settings = read_settings(arguments)
        log_to_stderr(settings.log_level, as_json=settings.log_format == "json")
        with signals_raised():
            _check(settings, arguments)
            if settings.print_pipeline:
                print(uvloop.run(drawn(settings)))
            elif settings.frontends > 1:
                serve_frontends(settings)
            else:
                uvloop.run(serve(settings, start_shown))
    except UNSTARTABLE as error:
        cause = f"penstock: {explained(error, arguments)}"
    else:
        return
    gc.collect()  # objects of vLLM complain when they end: not after the last line
    sys.exit(cause)
