"""Inspect: show a recording as an HTML page, with the tokens that caused each item and event."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from penstock.api.cli.arguments import PLUGINS, Parser, chosen_stages
from penstock.api.cli.stage_log import stage_log
from penstock.extensions.workbench.page.page import layout_of, page_of
from penstock.extensions.workbench.staged import staged
from penstock.extensions.workbench.timeline.timeline import replayed_or_recorded
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.recordings.response_folder import private_files


def main(arguments: Sequence[str]) -> None:
    """Show a recording as a page, with the tokens that caused each item and event."""
    parser = Parser(prog="penstock inspect", description=__doc__, parents=[PLUGINS])
    parser.add_argument("recording", type=Path, help="a recording's folder, or one of its files")
    parser.add_argument(
        "page", type=Path, nargs="?", help="the file to write (NAME.html; with --open, a temporary one)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    chosen = parser.parse_intermixed_args(arguments)
    name = chosen.recording.resolve().name
    with stage_log() as errors, staged(chosen.recording) as (shown, note):
        timeline = asyncio.run(replayed_or_recorded(shown, chosen_stages(chosen.plugins)))
    if note:
        print(f"penstock: {chosen.recording}: {note}", file=sys.stderr)
    errors.report(timeline.path, timeline.fault, timeline.end)
    page = chosen.page or _default(name, is_opened=chosen.open)
    write_page(page, page_of(layout_of(timeline, name)))
    print(page)
    if chosen.open and not webbrowser.open(page.resolve().as_uri()):
        raise CannotRun(f"{page}: no browser was found to open it")


def write_page(page: Path, text: str) -> None:
    """Write a page with recorded texts, which only its owner may read; raise `CannotRun` if that fails."""
    try:
        with private_files():
            page.write_text(text, "utf-8")
    except OSError as error:
        raise CannotRun(f"{page}: the page cannot be written: {error.strerror}") from error


def _default(name: str, *, is_opened: bool) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-")) if is_opened else Path()
    return folder / f"{name}.html"
