"""A Prometheus that scrapes a server.

Its programs are the machine's own, or those of Debian's package, which ``make prometheus`` unpacks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.support.boards import ALERTS
from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

UNPACKED = ROOT / ".cache/prometheus/usr/bin"

Series = list[dict[str, Any]]


def program(name: str) -> str:
    """Return the path of a program of Prometheus."""
    found = shutil.which(name, path=f"{UNPACKED}:{os.environ['PATH']}")
    assert found, f"{name} is missing: make prometheus"
    return found


@dataclass
class Prometheus:
    url: str

    def ask(self, path: str, **fields: object) -> Any:
        """Return the data of an answer; every other answer is an error."""
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(fields)}", timeout=PATIENCE) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def query(self, query: str) -> Series:
        result: Series = self.ask("query", query=query)["result"]
        return result

    def over_time(self, query: str, start: float, end: float, step: float) -> Series:
        result: Series = self.ask("query_range", query=query, start=start, end=end, step=step)["result"]
        return result


@contextmanager
def running_prometheus(server: str, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus for the length of a block; it scrapes the server at that URL each second."""
    job = {"job_name": "penstock", "static_configs": [{"targets": [server.removeprefix("http://")]}]}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [job],
    }
    file, url = folder / "prometheus.yml", f"http://127.0.0.1:{free_port()}"
    file.write_text(json.dumps(config))  # which is YAML, too
    command = [program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'series'}"]
    command += [f"--web.listen-address={url.removeprefix('http://')}", "--log.level=error"]
    with running_process(command, f"{url}/-/ready", folder / "prometheus.log"):
        yield Prometheus(url)
