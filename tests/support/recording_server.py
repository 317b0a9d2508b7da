"""A server that records what it says, in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipeline.record import FILES, FORMAT, Header, Recording, read_recording
from pipeline.recording.recorder import Recorder
from stages.generate.engine import Engine
from stages.harmony import HarmonyEncoding
from tests.support.server import Served, serving

DESCRIBED = Header(FORMAT, source=".cache/tiny", versions={"penstock": "0"})


@asynccontextmanager
async def recording(
    engine: Engine, encoding: HarmonyEncoding, folder: Path, *, recorder: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[Served[Any], None]:
    """Serve for the length of the block; behind it all is written that was said."""
    taps = Recorder(folder, DESCRIBED, **(recorder or {}))
    options.setdefault("edit", taps.tapped)
    try:
        async with serving(engine, encoding, str(folder.with_name(f"{folder.name}.sqlite3")), **options) as served:
            yield served
        assert not taps.takes
    finally:
        await taps.close()


def folders(folder: Path) -> list[Path]:
    """All responses that were recorded."""
    return list(folder.iterdir())


def the_one(folder: Path) -> Path:
    """The only response that was recorded."""
    (response,) = folders(folder)
    return response


def read(response: Path, stage: str) -> Recording:
    """What was behind a stage."""
    name, junction = FILES[stage]
    return read_recording(response / name, junction)


def files(response: Path) -> set[str]:
    """The names of a recording's files."""
    return {path.name for path in response.iterdir()}
