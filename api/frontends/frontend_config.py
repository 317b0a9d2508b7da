"""All that a frontend gets from the supervisor when it is started."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api.settings import Settings
from penstock.api.start.share import Share
from penstock.services.engines.vllm_cores import CoreClient
from penstock.services.engines.workers import end_with_parent


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The configuration of one frontend; one that is started again gets that of the one that died."""

    settings: Settings
    share: Share
    link: socket.socket
    listening: socket.socket
    """The socket at which the other servers of the store reach this frontend."""
    siblings: Sequence[str]
    """The URLs of the other frontends, for the other servers."""
    url: str
    output: tuple[Any, Any]
    """The descriptors of the supervisor's stdout and stderr: its own may be diverted while a model is loaded."""
    metrics: socket.socket | None = None
    """The socket of ``--metrics-port``, which all frontends have."""
    client: CoreClient | None = None
    """The way to the engine's cores, if vLLM is in this server."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The variables of the supervisor."""

    @property
    def name(self) -> str:
        """The name of the frontend, for the log."""
        return f"frontend {self.share.index + 1} of {self.share.count}"

    def apply(self) -> None:
        """Make this process that frontend: it ends with the supervisor, and Ctrl-C is for that one."""
        for descriptor, given in enumerate(self.output, start=1):
            sent = given.detach()
            os.dup2(sent, descriptor)
            os.close(sent)
        os.environ.update(self.environment)
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not (self.settings.verbose or self.settings.log_level == "DEBUG"):
            os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # the supervisor has seen the warnings
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
