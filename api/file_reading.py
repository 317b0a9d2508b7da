"""The reader of files that the settings describe."""

from __future__ import annotations

from penstock.api.settings import Settings
from penstock.services.files.file_reader import FileLimits, FileReader
from penstock.services.web.ssrf import AllowedNetworks


def file_reader(settings: Settings) -> FileReader:
    """Return a new reader; each has a cache and processes of its own."""
    limits = FileLimits(
        settings.max_file_bytes,
        seconds=settings.file_timeout,
        memory=settings.max_file_memory,
        pages=settings.max_file_pages,
        inflated=settings.max_file_inflated,
    )
    return FileReader(limits, AllowedNetworks.parse(settings.allow_address))
