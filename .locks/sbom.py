"""Write the bill of materials of penstock without vLLM: ``python .locks/sbom.py penstock.cdx.json``.

It is in the form of CycloneDX.  The packages are those of an environment with nothing else, in the versions that tests
run with.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from install import has_uv, options_for_uv

LISTER = "cyclonedx-bom==7.5.0"


def main() -> int:
    """Install, list, and return the status of what failed, or 0."""
    if not has_uv():
        return 1
    options, variables = options_for_uv(torch_backend=None)
    with TemporaryDirectory() as folder:
        built, environment = Path(folder) / "built", Path(folder) / "environment"
        python = environment / "bin" / "python"
        locked = ("-c", ".locks/test.txt", "--find-links", built)
        for command in (
            ("build", "-q", "--no-build-isolation", "--python", sys.executable, "-o", built),
            ("venv", "-q", "--python", sys.executable, environment),
            ("pip", "install", "-q", "--python", python, *options, *locked, "penstock-llm"),
            (
                *("tool", "run", "-q", *options, "--from", LISTER, "cyclonedx-py", "environment"),
                *("--pyproject", "pyproject.toml", "--output-reproducible", "-o", sys.argv[1], python),
            ),
        ):
            if status := subprocess.run((sys.executable, "-m", "uv", *command), env=variables, check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
