"""The audit log, as a resource without routes, as a block for commands, and as a check of the settings."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager

from aiohttp import web

from penstock.api.http import access_log
from penstock.api.resources.resources import ServerParts, checked
from penstock.api.settings import Settings
from penstock.extensions.audit.audit_file import MODE, AuditFile
from penstock.extensions.audit.records import line_of_decision, line_of_request
from penstock.pipeline import audit as decisions
from penstock.pipeline.errors import CannotStart


class _Listener(logging.Filter):
    """Writes records of one logger to the file, and lets those pass that the level of the log lets pass."""

    def __init__(self, file: AuditFile, line_of: Callable[[logging.LogRecord], bytes | None]) -> None:
        super().__init__()
        self._file, self._line_of = file, line_of

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the log shows a record, as it does without an audit log."""
        if record.levelno >= logging.INFO and (line := self._line_of(record)):
            self._file.note(line)
        return record.levelno >= logging.getLogger("penstock").getEffectiveLevel()


@contextmanager
def _listening(
    file: AuditFile, logger: logging.Logger, line_of: Callable[[logging.LogRecord], bytes | None]
) -> Iterator[None]:
    """Write the records of a logger for the length of a block, also those that the level of the log leaves out."""
    listener, level = _Listener(file, line_of), logger.level
    logger.addFilter(listener)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(listener)


def check_file(settings: Settings) -> None:
    """Raise `CannotStart` if the audit log cannot be written."""
    if settings.audit:
        try:
            os.close(os.open(settings.audit, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE))
        except OSError as error:
            raise CannotStart(f"--audit {settings.audit}: {error.strerror}") from error


async def check(settings: Settings) -> str:
    """Open the audit log."""
    check_file(settings)
    return f"into {settings.audit}" if settings.audit else "none"


def _opened(settings: Settings, closing: ExitStack) -> AuditFile | None:
    """Open the audit log, and have it get what is decided, until ``closing`` is closed; None without one."""
    if settings.audit is None:
        return None
    check_file(settings)
    file = AuditFile(settings.audit, settings.audit_bytes, settings.audit_files)
    file.open()
    closing.enter_context(_listening(file, decisions.logger, line_of_decision))
    return file


@checked(check_file)
@asynccontextmanager
async def audit(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Write the audit log for the length of a block, if the settings name a file for it."""
    with ExitStack() as closing:
        file = _opened(parts.settings, closing)
        if file:
            closing.enter_context(_listening(file, access_log.logger, line_of_request))
        try:
            yield ()
        finally:
            closing.close()
            if file:
                await asyncio.to_thread(file.close)


@contextmanager
def audited(settings: Settings) -> Iterator[None]:
    """Write what a command decides for the length of a block, if the settings name a file for it."""
    with ExitStack() as closing:
        file = _opened(settings, closing)
        try:
            yield
        finally:
            closing.close()
            if file:
                file.close()
