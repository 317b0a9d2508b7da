"""What penstock costs, beside vLLM's own frontend, and whether that is what was promised.

    python -m tests.bench [--quick] [--write] [PART...]

`tests/bench/METHOD.md` says how it is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import uvloop

from stages.harmony import load_encoding
from tests.bench.loopback import QUIET
from tests.bench.measuring import PARTS, Found, measured
from tests.bench.report import document, goals_table, write

FOLDER = Path("build/bench")
README = Path(__file__).with_name("README.md")
DETAILS = ("tokens", "chat", "log", "validation")


def details(names: list[str], found: Found) -> None:
    """Tables of ours alone, which answer no goal."""
    from tests.bench.chat import chat_figures  # noqa: PLC0415 - each brings much with it
    from tests.bench.log import log_figures  # noqa: PLC0415
    from tests.bench.tokens import package_encoding, token_table, variant_table  # noqa: PLC0415
    from tests.bench.validation import validation_figures  # noqa: PLC0415

    if "tokens" in names:
        package_encoding()
        found.tables["our stages behind the engine"] = uvloop.run(token_table())
        found.tables["items of every kind"] = uvloop.run(variant_table())
    if "chat" in names:
        found.tables["chat models"] = uvloop.run(chat_figures())
    if "log" in names:
        found.tables["the event log"] = log_figures()
    if "validation" in names:
        found.tables["validation"] = uvloop.run(validation_figures())


def main() -> None:
    """Measure what is asked for, and tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, *DETAILS, []], help="what to measure; all of it if none")
    parser.add_argument("--quick", action="store_true", help="less of each, and no tables of details")
    parser.add_argument("--write", action="store_true", help=f"keep the tables in {README.name} beside this file")
    asked = parser.parse_args()
    os.environ.update(QUIET)
    FOLDER.mkdir(parents=True, exist_ok=True)
    load_encoding()
    gc.collect()
    gc.freeze()  # as a server does once it is up
    parts = asked.parts or [*PARTS, *(() if asked.quick else DETAILS)]
    found = uvloop.run(measured([part for part in PARTS if part in parts], FOLDER, is_quick=asked.quick))
    details(parts, found)
    write(found, FOLDER)
    print(document(found))
    if asked.write:
        README.write_text(document(found))
    print(goals_table(found))


if __name__ == "__main__":
    main()
