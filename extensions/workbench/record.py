"""Record what a server of any make answers, by a proxy in front of it that passes everything through."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import uvloop

from penstock.api.cli.arguments import Parser
from penstock.api.dialects.named import OPTION, spoken
from penstock.api.start.serving import stop_signals
from penstock.extensions.workbench.wiretap.proxy import Proxy, checked, proxying
from penstock.extensions.workbench.wiretap.spoken import generations
from penstock.extensions.workbench.wiretap.tap import Tap
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import log_to_stderr
from penstock.pipeline.recordings.sampling import ALWAYS, Condition

logger = logging.getLogger(__name__)

PORT = 8100


def main(arguments: Sequence[str]) -> None:
    """Record what a server of any make answers, by a proxy in front of it."""
    chosen = _parser().parse_args(arguments)
    if chosen.ask_for_tokens and not chosen.texts:
        raise CannotRun("--ask-for-tokens: tokens are texts, which --no-record-texts does not write")
    log_to_stderr("INFO")
    try:
        uvloop.run(_recording(chosen, checked(chosen.upstream)))
    except OSError as error:
        raise CannotRun(str(error)) from error


def _parser() -> Parser:
    parser = Parser(prog="penstock record", description=__doc__)
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", default=Path("recordings"), help="gets a folder per answer"
    )
    parser.add_argument("--upstream", metavar="URL", required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"the port to listen at ({PORT})")
    parser.add_argument(
        "--record-if",
        dest="condition",
        type=_condition,
        default=ALWAYS,
        metavar="CONDITION",
        help="record a fraction of answers (0.01), or those to a request with a header (x-record, x-record=yes)",
    )
    parser.add_argument(
        "--no-record-texts", dest="texts", action="store_false", help="record the shape of texts only, and no requests"
    )
    parser.add_argument(
        "--ask-for-tokens",
        action="store_true",
        help="ask vLLM for the ids of tokens (return_token_ids) in chats and completions, and record them",
    )
    parser.add_argument(
        OPTION, action="append", default=[], metavar="DIALECT", help="a dialect of yours, as for penstock serve"
    )
    return parser


def _condition(text: str) -> Condition:
    try:
        return Condition.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


async def _recording(chosen: argparse.Namespace, upstream: str) -> None:
    tap = Tap(
        chosen.folder,
        upstream=upstream,
        generations=generations(spoken(chosen.dialect)),
        condition=chosen.condition,
        keeps_texts=chosen.texts,
    )
    async with proxying(Proxy(upstream, tap, chosen.ask_for_tokens), chosen.host, chosen.port) as url:
        if not _is_loopback(chosen.host):
            logger.warning(
                "--host %s: other machines can send requests to %s through this proxy", chosen.host, upstream
            )
        print(f"Recording {upstream} at {url} into {chosen.folder}. Ctrl-C ends it.", flush=True)
        stop, _ = stop_signals()
        await stop.wait()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
