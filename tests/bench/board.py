"""The picture of the Grafana board: its own queries, answered by Prometheus while a server is under load.

The server has the tiny gpt-oss; what the panels show is drawn as Grafana would, without Grafana.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from PIL import Image

from tests.support.boards import Panel, chosen, panels
from tests.support.processes import free_port
from tests.support.prometheus import Prometheus, running_prometheus
from tests.support.serve_command import WEATHER, running

SECONDS, STEP, OVER = 150, 2, 20
"""Seconds of load, between two points, and over which rates are taken."""

KEYS = {"sk-of-the-first-client": 10, "sk-of-the-second-client": 3}
"""The clients of each key."""

COLUMNS = 4
UNITS = {"percentunit": 100.0, "bytes": 1 / 2**20, "s": 1.0}
NAMES = {"percentunit": "%", "bytes": "MiB", "s": "s", "reqps": "1/s", "ops": "1/s"}
ENDLESS, HELLO, FORECAST = "Never stop talking.", "Say hello.", "What is the weather in Paris?"


def requests() -> list[tuple[float, dict[str, Any]]]:
    """Return the requests of clients, each with its weight."""
    weather = {"input": FORECAST, "tools": [WEATHER]}
    return [
        (6, {"input": HELLO, "stream": True}),
        (3, {"input": "Remember the number seven.", "stream": True}),
        (3, {**weather, "stream": True}),
        (3, {"input": ENDLESS, "stream": True, "max_output_tokens": 300}),
        (2, {"input": HELLO, "temperature": 0}),
        (2, {"input": HELLO, "background": True}),
        (1, {"input": ENDLESS, "background": True, "max_output_tokens": 1500}),
        (1, {"input": HELLO, "temperature": 7}),
        (1, {"input": HELLO, "previous_response_id": "resp_0"}),
    ]


async def load(url: str) -> None:
    """Send requests for `SECONDS`, from more and then fewer clients than the engine has places."""
    began = time.monotonic()

    async def client(key: str, number: int) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        weights, bodies = zip(*requests(), strict=True)
        pick = random.Random(number)
        async with aiohttp.ClientSession(headers=headers) as session:
            while (passed := time.monotonic() - began) < SECONDS:
                if number * SECONDS / 20 > passed:  # one after another joins
                    await asyncio.sleep(1)
                    continue
                (body,) = pick.choices(bodies, weights)
                with suppress(aiohttp.ClientError):
                    async with session.post(f"{url}/v1/responses", json=body) as answer:
                        async for _ in pieces(answer, leaves=pick.random() < 0.05):
                            pass

    clients = [client(key, number) for key, count in KEYS.items() for number in range(count)]
    await asyncio.gather(*clients)


async def pieces(answer: aiohttp.ClientResponse, *, leaves: bool) -> AsyncIterator[bytes]:
    """Read an answer, to its end or only a part of it."""
    async for piece in answer.content.iter_any():
        yield piece
        if leaves:
            return


def draw(prometheus: Prometheus, began: float, ended: float, file: Path) -> None:
    """Draw the panels of the board that have data."""
    shown = [(panel, found) for panel in panels() if (found := points(prometheus, panel, began, ended))]
    rows = math.ceil(len(shown) / COLUMNS)
    mpl.rcParams |= {"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}
    canvas = Canvas(figsize=(4 * COLUMNS, 2.1 * rows), dpi=80, layout="constrained")
    places = canvas.subplots(rows, COLUMNS).flatten()
    for place, (panel, found) in zip(places, shown, strict=False):
        draw_panel(place, panel, found)
    for place in places[len(shown) :]:
        place.set_visible(False)
    drawn = BytesIO()
    canvas.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(64).save(file, optimize=True)


Points = dict[str, tuple[list[float], list[float]]]


def points(prometheus: Prometheus, panel: Panel, began: float, ended: float) -> Points:
    """Return the series of a panel by their legends: the seconds since the beginning, and the values."""
    found: Points = {}
    scale = UNITS.get(panel.unit, 1.0)
    for query, legend in panel.queries:
        for series in prometheus.over_time(chosen(query, OVER), began, ended, STEP):
            name = legend
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            values = [(at - began, float(value) * scale) for at, value in series["values"] if value != "NaN"]
            if values:
                found[name] = ([at for at, _ in values], [value for _, value in values])
    return found


def draw_panel(place: Axes, panel: Panel, found: Points) -> None:
    unit = NAMES.get(panel.unit, "")
    place.set_title(f"{panel.title} [{unit}]" if unit else panel.title, loc="left", fontweight="bold", fontsize=8)
    for name, (times, values) in sorted(found.items(), key=lambda series: -max(series[1][1]))[:7]:
        place.plot(times, values, linewidth=1.2, label=name)
    place.set_ylim(bottom=0)
    place.grid(alpha=0.25)
    place.legend(fontsize=6, frameon=False, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the picture to write")
    file = parser.parse_args().file
    port = free_port()
    options = ("--engine-places", "6", "--metrics-by-key", "--metrics-port", str(port), "--no-sandbox")
    environment = {"PENSTOCK_API_KEYS": ",".join(KEYS), "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    with (
        TemporaryDirectory() as folder,
        running(Path(folder) / "store.sqlite3", *options, **environment) as server,
        running_prometheus(f"http://127.0.0.1:{port}", Path(folder)) as prometheus,
    ):
        began = time.time()
        asyncio.run(load(server.url))
        draw(prometheus, began, time.time(), file)


if __name__ == "__main__":
    main()
