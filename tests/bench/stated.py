"""The measured figures that pages for users state: where each stands, and how it is measured again.

``make figures`` compares them, and so does `test_stated`.  A page says of every other figure when it was measured.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import statistics
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.extensions.tools.sandbox.folder import Folder
from penstock.extensions.tools.sandbox.probe import Sandbox, probe
from penstock.pipeline.distribution import DISTRIBUTION
from penstock.services.engines.cached_blocks import BlockStored, CachedBlocks
from penstock.services.engines.scripted import ScriptedEngine
from tests.bench.apis import CHAT, RESPONSES
from tests.bench.beside import AT_A_PACE, AT_FULL_SPEED, LONG_REQUEST, OPEN_STREAM, SHORT_REQUEST
from tests.bench.beside import IN_TIME as IN_TIME_OF
from tests.support.paths import HARMONY, PRODUCT, ROOT
from tests.support.processes import free_port, running_process
from tests.support.server import PacedEngine, completed_response, running_server, script
from tests.support.stated import GB, KB, MB, Stated

DISK_BLOCK = 4096
"""Bytes in which a file system gives out its space."""

BENCH = ROOT / "tests" / "bench"


def on_disk(files: Iterable[Path]) -> int:
    """Return the bytes that files take on a disk; a Python module counts twice, as pip compiles it."""
    sizes = ((-(-file.stat().st_size // DISK_BLOCK) * DISK_BLOCK, file.suffix) for file in files)
    return sum(size * (1 + (suffix == ".py")) for size, suffix in sizes)


def files_of(package: str) -> Iterator[Path]:
    """Yield the files that an installed package brings, but for those that are compiled here."""
    for file in distribution(package).files or ():
        path = Path(str(file.locate()))
        if path.suffix != ".pyc" and path.is_file():
            yield path


def installed_with(package: str) -> set[str]:
    """Return the names of a package and of all that it requires here."""
    found, todo = set[str](), [Requirement(package)]
    while todo:
        wanted = todo.pop()
        if (name := canonicalize_name(wanted.name)) in found:
            continue
        found.add(name)
        for line in distribution(name).requires or ():
            needed = Requirement(line)
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                todo.append(needed)
    return found


def environment_without_vllm() -> float:
    """Return the bytes of an environment with the wheel, which pip has installed."""
    packages = installed_with(DISTRIBUTION) - {DISTRIBUTION} | {"pip", "setuptools"}
    product = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return on_disk(file for package in packages for file in files_of(package)) + on_disk(filter(Path.is_file, product))


def vllm_on_a_cpu() -> float:
    """Return the bytes of the packages of the lock for vLLM's CPU build."""
    names = [line.partition("==")[0] for line in (ROOT / ".locks" / "cpu.txt").read_text().splitlines()]
    return on_disk(file for name in names for file in files_of(name))


def bytes_of_a_block() -> float:
    """Return the memory that the index of a prefix cache takes for a block of 16 tokens."""
    count, size = 20_000, 16
    tracemalloc.start()
    try:
        blocks = CachedBlocks()
        blocks.take(0, BlockStored([number.to_bytes(32) for number in range(count)], None, [7] * (count * size), size))
        return tracemalloc.get_traced_memory()[0] / blocks.count(0)
    finally:
        tracemalloc.stop()


def own_memory(process: psutil.Process) -> int:
    """Return the bytes of a process that no file backs: others may share the pages of programs."""
    [line] = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1]) * 1024


async def memory_of_an_idle_python() -> float:
    """Return the memory that a Python of a container takes for itself."""
    found = await probe("python")
    assert isinstance(found, Sandbox), found.reason
    folder, before = Folder(drops_user=os.geteuid() == 0), set(psutil.Process().children(recursive=True))
    process = await found.start(folder)
    try:
        return float(sum(map(own_memory, set(psutil.Process().children(recursive=True)) - before)))
    finally:
        await process.end()
        await folder.remove()


def memory_of_a_server() -> float:
    """Return the memory of a server that nobody has called."""
    port = free_port()
    program = Path(sys.executable).with_name("penstock")
    command = [str(program), "serve", "--engine", f"replay:{HARMONY}", "--store", "none"]
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running_process([*command, "--port", str(port)], f"http://127.0.0.1:{port}/health", log) as process:
            return float(psutil.Process(process.pid).memory_info().rss)


async def memory_of_a_waiting_response(words: int) -> float:
    """Return the memory of a background response that waits with its pipeline open, for a prompt of ``words`` words."""
    engine, text = PacedEngine(script()), "word " * words
    engine.hold()
    with TemporaryDirectory() as folder:
        async with running_server(engine, Path(folder), limit=1, max_body_bytes=10 * words + 10_000) as server:

            async def add(count: int) -> None:
                for _ in range(count):
                    _, answer = await server.post({"input": text, "background": True})
                    assert answer["status"] in ("queued", "in_progress")
                gc.collect()

            await add(5)
            tracemalloc.start()
            try:
                await add(20)
                return tracemalloc.get_traced_memory()[0] / 20
            finally:
                tracemalloc.stop()


def memory_of_waiting_tokens() -> float:
    """Return the memory of 1,000 tokens in the prompt of such a response."""
    short, long = (asyncio.run(memory_of_a_waiting_response(words)) for words in (2, 10_002))
    return (long - short) / 10


def bytes_in(folder: Path) -> int:
    """Return the bytes of the files of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


async def disk_of_a_short_response() -> float:
    """Return the bytes that a stored response takes in SQLite, on average."""
    sizes, count = list[int](), 100
    for number in (0, count):
        with TemporaryDirectory() as folder:
            async with running_server(ScriptedEngine(script()), Path(folder)) as server:
                for _ in range(number):
                    await completed_response(server, input="Say hello.")
            sizes.append(bytes_in(Path(folder)))
    empty, filled = sizes
    return (filled - empty) / count


def bytes_of_a_recorded_token() -> float:
    """Return the bytes that a recorded response takes for each of its tokens."""
    folder = HARMONY / "long_reasoning"
    tokens = json.loads((folder / "response.json").read_text())["usage"]["output_tokens"]
    return bytes_in(folder) / float(tokens)


def benched(part: str, what: str, unit: float = 1.0) -> float:
    """Return the median of penstock's figure in a unit, as the benchmark has measured it last."""
    [found] = [each for name, each in json.loads((BENCH / "bench.json").read_text()).items() if name == part]
    goals = [goal["ours"] for goal in found["goals"] if goal["what"] == what]
    compared = [each["ours"] for some in found["comparisons"].values() for each in some if each["what"] == what]
    return float(statistics.median([*goals, *compared][0]["rounds"])) * unit


def frontends(tokens: float) -> float:
    """Return the frontends that an engine needs which makes so many tokens a second, in answers of 500."""
    return tokens * (A_TOKEN() + SHORT() / 500) / 0.7


def sized(streams: int) -> float:
    """Return the memory of a server with open streams."""
    return memory_of_a_server() + streams * KB * A_STREAM()


INSTALL, DEPLOY, MANY, AFFINITY = "docs/INSTALL.md", "deploy/README.md", "docs/MANY_GPUS.md", "docs/AFFINITY.md"
BLOCKS = 10**6 / 16
"""Blocks of an engine with a million tokens."""

US, MS = 1e-6, 1e-3
APPEND = "a durable append, 64 writers"
A_STREAM = partial(benched, "memory", f"{CHAT}: {OPEN_STREAM}")
A_TOKEN = partial(benched, "servers", f"{RESPONSES}: {AT_A_PACE}", US)
BUSY = partial(benched, "servers", f"{RESPONSES}: {AT_FULL_SPEED}", US)
SHORT = partial(benched, "requests", f"{RESPONSES}: {SHORT_REQUEST}", US)
LONG = partial(benched, "first", f"{RESPONSES}: {LONG_REQUEST}", US)
IN_TIME = partial(benched, "paced", f"{CHAT}: {IN_TIME_OF}")
MEASURED_HERE = {
    "an environment without vLLM": Stated(INSTALL, r"This takes ([\d,]+) MB", environment_without_vllm, MB),
    "vLLM on a CPU": Stated(INSTALL, r"needs x86-64, ([\d.]+) GB of disk", vllm_on_a_cpu, GB),
    "the same, installed by make": Stated(
        "Makefile", r"CPU build: a minute or two, and ([\d.]+) GB", vllm_on_a_cpu, GB
    ),
    "a block of a prefix cache": Stated(AFFINITY, r"([\d]+) bytes for each block", bytes_of_a_block),
    "an engine's blocks": Stated(
        AFFINITY, r"([\d]+) MB for an engine with a million", lambda: bytes_of_a_block() * BLOCKS, MB
    ),
    "an idle Python": Stated(
        "docs/CONTAINERS.md", r"takes ([\d]+) MiB of memory", lambda: asyncio.run(memory_of_an_idle_python()), 2**20
    ),
    "a recorded token": Stated("docs/RECORDINGS.md", r"a token takes about ([\d]+) bytes", bytes_of_a_recorded_token),
    "a server": Stated(DEPLOY, r"memory \| ([\d]+) MB after the start", memory_of_a_server, MB),
    "a server with 200 streams": Stated(DEPLOY, r"\| ([\d]+) MB, without those of the engine", lambda: sized(200), MB),
    "a million short responses": Stated(
        DEPLOY, r"responses: ([\d.]+) GB", lambda: 10**6 * asyncio.run(disk_of_a_short_response()), GB
    ),
    "a waiting response": Stated(
        "docs/LIMITS.md", r"about ([\d]+) KiB each, and", lambda: asyncio.run(memory_of_a_waiting_response(2)), 2**10
    ),
    "1,000 tokens of its prompt": Stated(
        "docs/LIMITS.md", r"([\d]+) KiB for each 1,000 tokens", memory_of_waiting_tokens, 2**10
    ),
    "a short response": Stated(
        DEPLOY, r"disk \| ([\d.]+) KB for a short", lambda: asyncio.run(disk_of_a_short_response()), KB
    ),
}
"""Sizes, which are about the same on every machine."""

BENCHED = {
    "a stream's memory": Stated(DEPLOY, r"([\d.]*\d) KB for an open stream", A_STREAM),
    "a token, busy": Stated(DEPLOY, r"CPU of the server \| ([\d.]*\d) to", BUSY, US),
    "a token, at a pace": Stated(DEPLOY, r"to ([\d.]*\d) us for a token", A_TOKEN, US),
    "200 streams": Stated(DEPLOY, r"([\d.]*\d) cores", lambda: 200 * 50 * A_TOKEN()),
    "a request": Stated(DEPLOY, r"([\d.]*\d) ms for a request of 500 tokens", SHORT, MS),
    "a long request": Stated(DEPLOY, r"([\d.]*\d) ms for one of 70,000", LONG, MS),
    "streams in time": Stated(DEPLOY, r"20 ms with ([\d,]*\d) streams", IN_TIME),
    "servers in time": Stated(DEPLOY, r"servers, if 20 ms matter: ([\d]+)", lambda: math.ceil(200 / IN_TIME())),
    "appends": Stated(DEPLOY, r"([\d,]*\d) durable appends", lambda: 1 / benched("store", APPEND, US)),
    "c, at a pace": Stated(MANY, r"is about ([\d.]*\d) us if each stream", A_TOKEN, US),
    "c, busy": Stated(MANY, r"and ([\d.]*\d) us in a busy frontend", BUSY, US),
    "q": Stated(MANY, r"q is ([\d.]*\d) ms for a prompt of 500", SHORT, MS),
    "N": Stated(MANY, r"answers of 500 tokens: ([\d.]*\d) at 20,000", lambda: frontends(20_000)),
    "N, fast": Stated(MANY, r"tokens/s, ([\d.]*\d) at 35,000", lambda: frontends(35_000)),
    "N, eight": Stated(MANY, r"these GPUs ([\d.]*\d) to", lambda: frontends(8 * 20_000)),
    "N, eight fast": Stated(MANY, r"these GPUs [\d.]+ to ([\d.]*\d)", lambda: frontends(8 * 35_000)),
}
"""Figures of the benchmark's last run, on its machine, which writes them."""

STATED = MEASURED_HERE | BENCHED


def restate() -> None:
    """Write the figures of the benchmark's last run into the pages that state them."""
    for each in BENCHED.values():
        each.write(each.measure())


def row(name: str, each: Stated, measured: float) -> str:
    """Return a line about a figure: the page, what it states, and what is measured."""
    figures = f"{each.stated / each.unit:10,g} {measured / each.unit:10,.4g}"
    return f"{name:28} {each.page:20} {figures}{'' if each.holds(measured) else '  wrong'}"


def main() -> None:
    """Measure all figures again; exit with status 1 if a page is wrong about one."""
    measured = {name: each.measure() for name, each in STATED.items()}
    sys.stdout.writelines(f"{row(name, STATED[name], figure)}\n" for name, figure in measured.items())
    sys.exit(not all(STATED[name].holds(figure) for name, figure in measured.items()))


if __name__ == "__main__":
    main()
