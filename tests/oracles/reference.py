"""``make reference``: the tests of the API's tables, with the types and the routes of the newest SDKs.

The wheels are fetched from pip's index into ``.cache/reference``, and stand before the installed versions on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile

from tests.support.paths import ROOT

FOLDER = ROOT / ".cache" / "reference"

TESTS = ("tests/flow/test_parameters.py", *map(str, sorted(ROOT.glob("tests/*/**/test_sdk_*.py"))))


def fetched() -> str:
    """Fetch and unpack the newest wheels; return their file names."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(FOLDER))
    subprocess.run([sys.executable, "-m", "pip", "download", *options, "openai", "anthropic"], check=True)
    wheels = sorted(FOLDER.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(FOLDER)
    return " and ".join(wheel.name for wheel in wheels)


def main() -> int:
    sys.stdout.write(f"The tables beside {fetched()}\n")
    sys.stdout.flush()
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *TESTS, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
