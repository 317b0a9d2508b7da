"""The settings by which hosts read files."""

from __future__ import annotations

from penstock.api.settings import Settings
from penstock.services.tools import FileLimits, HostSettings
from penstock.services.web.ssrf import AllowedNetworks


def file_settings(settings: Settings) -> HostSettings:
    """Return what hosts need to read files: their limits, and the networks from which they may be fetched."""
    limits = FileLimits(
        settings.max_file_bytes,
        seconds=settings.file_timeout,
        memory=settings.max_file_memory,
        pages=settings.max_file_pages,
        inflated=settings.max_file_inflated,
    )
    return HostSettings(allowed=AllowedNetworks.parse(settings.allow_address), file_limits=limits)
