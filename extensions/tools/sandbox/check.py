"""The check of `penstock check` that starts a sandbox of each kind."""

from __future__ import annotations

from penstock.api.settings import Settings
from penstock.extensions.tools.sandbox.probe import probe


async def check(settings: Settings) -> str:
    """Start a sandbox of each kind."""
    if not settings.sandbox:
        return "off"
    python, container = await probe("python"), await probe("container")
    return f"{python.describe()}; {container.describe()}"
