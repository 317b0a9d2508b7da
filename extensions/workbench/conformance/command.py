"""Conformance: check how far a server keeps to the Responses, Chat Completions, Messages or Decisions API."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit, urlunsplit

from rich.console import Console

from penstock.api.cli.arguments import Parser
from penstock.api.settings.sources import CLIENT_KEY
from penstock.extensions.workbench.conformance.badge import as_badge
from penstock.extensions.workbench.conformance.check import Speech
from penstock.extensions.workbench.conformance.checks import ALL
from penstock.extensions.workbench.conformance.client import Server
from penstock.extensions.workbench.conformance.junit import as_junit
from penstock.extensions.workbench.conformance.report import as_json, counts, show
from penstock.extensions.workbench.conformance.run import Outcome, chosen, model_of, outcomes, spoken
from penstock.pipeline.errors import CannotRun

SPEECHES: tuple[Speech, ...] = get_args(Speech)


def main(arguments: Sequence[str]) -> None:
    """Check how far a server keeps to the API.

    It exits with status 1 if the server fails a check, and with 2 if its limits kept one from telling.
    """
    options = _parser().parse_args(arguments)
    if options.list:
        for check in ALL:
            print(f"{check.name:32s}{'*' if check.is_core else ' '} {check.rule}")
        return
    if options.url is None:
        raise CannotRun("give the URL of a server, such as http://127.0.0.1:8000/v1")
    server, found = asyncio.run(_run(options))
    try:
        if options.junit:
            options.junit.write_bytes(as_junit(server, found))
        if options.badge:
            options.badge.write_text(as_badge(found))
    except OSError as error:
        raise CannotRun(str(error)) from error
    if options.json:
        print(json.dumps(as_json(server, found), indent=2))
    else:
        show(Console(highlight=False, markup=False, emoji=False, soft_wrap=False), found, full=options.verbose)
    sys.exit(1 if counts(found)["fail"] else 2 if any(each.is_limited for each in found) else 0)


def _parser() -> Parser:
    parser = Parser(
        prog="penstock conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="the server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", help="the model to request; the first one that the server lists")
    parser.add_argument("--api-key", help=f"the key for the server; the variable {CLIENT_KEY} is not seen by others")
    parser.add_argument("--dialect", action="append", choices=SPEECHES, help="check this API alone; repeat it for more")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run these checks: a name, a pattern or an area"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the report as JUnit XML, too")
    parser.add_argument("--badge", type=Path, metavar="FILE.svg", help="write a badge, too")
    parser.add_argument("--verbose", action="store_true", help="list the checks that pass and are skipped, too")
    parser.add_argument("--list", action="store_true", help="list all checks with their rules; * marks the core")
    parser.add_argument("--at-once", type=_positive, default=4, metavar="N", help="checks that run at once (4)")
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="the longest time of a request (60)"
    )
    parser.add_argument(
        "--max-tokens", type=_positive, default=1024, metavar="N", help="tokens of an answer (1024); thoughts count"
    )
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    if not 0 < (number := float(text)) < 86_400:
        raise ValueError
    return number


def base_of(url: str) -> str:
    """Return the base of the routes: ``/v1``, unless the URL has a path."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_right = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_right = False
    if not is_right:
        raise CannotRun(f"{url} is no URL of a server, such as http://127.0.0.1:8000/v1")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))


async def _run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Outcome]]:
    base = base_of(options.url)
    speeches = tuple(dict.fromkeys(options.dialect or SPEECHES))
    checks = chosen(ALL, speeches, options.only)
    key = options.api_key or os.environ.get(CLIENT_KEY, "")
    async with Server.opened(
        base, options.model, key=key, timeout=options.timeout, max_tokens=options.max_tokens
    ) as server:
        server.model = await model_of(server, options.model)
        missing = {} if options.dialect else await spoken(server, speeches)
        found = [each async for each in outcomes(server, checks, missing=missing, at_once=options.at_once)]
    about = {"url": base, "model": server.model, "when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    return about, found
