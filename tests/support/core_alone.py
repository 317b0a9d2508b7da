"""The core in a process without the libraries that only extensions need, and without extensions.

A command: ``python -m tests.support.core_alone imports``, or ``serves FOLDER``; then packages to take away, besides.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

LIBRARIES = ("mcp", "numpy", "pypdfium2", "rich", "selectolax")
ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "pipeline", "services", "stages", "testing")

MESSAGE = {"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}


class Missing:
    """A finder, before all others, by which packages cannot be found."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def core_modules() -> Iterator[str]:
    """Yield the names of all modules of the core, but of those that run a program."""
    yield "penstock.server"
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__main__":
                yield ".".join(("penstock", *parts)).removesuffix(".__init__")


def import_core() -> str:
    """Import each module of the core; return how many there are."""
    names = list(core_modules())
    for name in names:
        import_module(name)
    return str(len(names))


def take_away(packages: Sequence[str]) -> None:
    """Let packages be found no more, nor what they register."""
    sys.meta_path.insert(0, Missing(packages))
    installed, prefixes = importlib.metadata.entry_points, tuple(f"{package}." for package in packages)

    def others(**wanted: Any) -> Any:
        points: Any = installed(**wanted)
        return importlib.metadata.EntryPoints(point for point in points if not point.value.startswith(prefixes))

    importlib.metadata.entry_points = others


async def serve(folder: Path) -> str:
    """Start a server on recordings, and its tools, and send it requests; return what it answers."""
    from aiohttp import ClientSession, web  # noqa: PLC0415 - after the packages are taken away

    from penstock.api.settings import Settings  # noqa: PLC0415
    from penstock.pipeline.plugins import WrongPlugin  # noqa: PLC0415
    from penstock.server import application  # noqa: PLC0415
    from penstock.services.toolbox import open_toolbox  # noqa: PLC0415
    from penstock.services.tools import HostSettings  # noqa: PLC0415

    tools = await open_toolbox(HostSettings())
    lines = [f"hosts {sorted(tools.hosts)}"]
    try:
        await open_toolbox(HostSettings(mcp_config=folder, web_search="searxng=http://localhost"))
    except WrongPlugin as error:
        lines.append(str(error).partition(":")[0])
    await tools.close()
    settings = Settings(
        engine=[f"replay:{ROOT / 'fixtures' / 'harmony'}"], store=str(folder / "store.sqlite3"), sandbox=False
    )
    runner = web.AppRunner(await application(settings), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            for given in ("Hi", [MESSAGE]):
                async with client.post("/v1/responses", json={"model": "greeting", "input": given}) as answer:
                    body = await answer.json()
                    lines.append(f"{answer.status} {body.get('status') or body['error']['param']}")
            for path in ("files", "vector_stores"):
                async with client.get(f"/v1/{path}") as answer:
                    lines.append(f"{path} {answer.status}")
    finally:
        await runner.cleanup()
    return "\n".join(lines)


def main() -> None:
    what, *given = sys.argv[1:]
    if what == "imports":
        take_away((*LIBRARIES, *given))
        sys.stdout.write(import_core())
    else:
        take_away((*LIBRARIES, *given[1:]))
        sys.stdout.write(asyncio.run(serve(Path(given[0]))))


if __name__ == "__main__":
    main()
