"""``make reference``: the tests of the API's tables, with the types of the newest openai-python.

The wheel is fetched from pip's index into ``.cache/reference``, and stands before the installed version on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile

from tests.support.paths import ROOT

FOLDER = ROOT / ".cache" / "reference"

TESTS = ("tests/flow/test_parameters.py", "tests/flow/api/test_sdk_fields.py")


def fetched() -> str:
    """Fetch and unpack the newest wheel; return its file name."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(FOLDER))
    subprocess.run([sys.executable, "-m", "pip", "download", *options, "openai"], check=True)
    (wheel,) = FOLDER.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(FOLDER)
    return wheel.name


def main() -> int:
    sys.stdout.write(f"The tables beside {fetched()}\n")
    sys.stdout.flush()
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *TESTS, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
