"""Run OGX's own tests of files, vector stores and file search against penstock.

They run under `stand_ins` in place of OGX.  The model is that of `searching_model`, and texts are also found by the
vectors of `word_vectors`.  A test that fails needs an explanation in ``differences.toml``, and an explanation needs a
test that fails.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.oracles.ogx.word_vectors import running_embeddings
from tests.oracles.sources import OGX
from tests.oracles.suite import Suite
from tests.support.processes import free_port, running_process

HERE = Path(__file__).parent
SUITE = Suite(HERE, "tests/integration")

TESTS = (
    *(
        f"files/test_files.py::test_{name}"
        for name in ("openai_client_basic_operations", "expires_after", "expires_after_requests")
    ),
    "responses/test_file_search.py",
    *(
        f"responses/test_tool_responses.py::test_response_{name}"
        for name in (
            "non_streaming_file_search",
            "non_streaming_file_search_empty_vector_store",
            "sequential_file_search",
        )
    ),
    "vector_io/test_openai_vector_stores.py",
    "vector_io/test_vector_io_filters.py",
    "vector_io/test_vector_stores_access_control.py",
)
"""The tests of OGX about files."""

KEYS = {"ALICE_TOKEN": "sk-alice-0123456789", "BOB_TOKEN": "sk-bob-0123456789"}
"""Two users, by the variables in which OGX's tests look for their keys."""


def main() -> int:
    """Print the table, write the report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make ogx ARGS=", description=__doc__)
    parser.add_argument("-k", dest="selected", default="", help="only the tests that pytest selects by this")
    selected: str = parser.parse_args().selected
    with TemporaryDirectory() as folder, running_server(Path(folder)) as url:
        place = Path(folder) / "tests of ogx"
        shutil.copytree(OGX.folder(), place)
        shutil.copy(HERE / "stand_ins.py", place / SUITE.root / "conftest.py")
        options = ["-k", selected] if selected else []
        results = list(SUITE.results(place, TESTS, KEYS | {"SERVER_URL": url}, *options))
    lines, is_explained = SUITE.judge(results, all_ran=not selected)
    print(*lines, sep="\n")
    return int(not is_explained)


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """Run the server under test for the length of the block; yield its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running_embeddings() as embeddings:
        command = [
            str(Path(sys.executable).with_name("penstock")),
            "serve",
            f"--engine={HERE / 'searching_model.py'}:engine",
        ]
        command += [f"--port={port}", f"--store={folder / 'store.sqlite3'}", f"--embeddings={embeddings}"]
        keys = {"PENSTOCK_API_KEYS": ",".join(KEYS.values())}
        with running_process(command, f"{url}/health", folder / "serve.log", keys):
            yield url


if __name__ == "__main__":
    sys.exit(main())
