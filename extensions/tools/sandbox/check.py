"""The check of `penstock check` that starts a sandbox of each kind."""

from __future__ import annotations

from typing import get_args

from penstock.api.settings import Settings
from penstock.extensions.tools.sandbox.plan import Kind
from penstock.extensions.tools.sandbox.probe import probe


async def check(settings: Settings) -> str:
    """Start a sandbox of each kind."""
    if not settings.sandbox:
        return "off"
    return "; ".join([(await probe(kind)).describe() for kind in get_args(Kind)])
