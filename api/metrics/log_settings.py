"""The settings of the log and of the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, CliSuppress

from penstock.api.values import Duration, Size


def in_capitals(value: Any) -> Any:
    """Return a text in capitals; leave anything else to pydantic."""
    return value.upper() if isinstance(value, str) else value


class LogSettings(BaseSettings):
    """The log."""

    SECTION: ClassVar[str] = "Log"

    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(in_capitals)] = Field(
        default="INFO", description="least level of log lines"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="lines for people, or one JSON object per line; SIGUSR1 switches DEBUG on and off"
    )
    verbose: bool = Field(
        default=False, description="show the lines of vLLM, also those that are only about its progress"
    )
    slow_callback: Duration = Field(
        default="0.25s",
        validate_default=True,
        description="time for which code may hold the event loop before the log names it; 0: never",
    )
    log_prompts: bool = Field(default=False, description="log the prompt of each turn, with its sampling parameters")
    log_outputs: bool = Field(
        default=False, description="log the output of the model, item by item; reasoning is marked"
    )
    audit: Path | None = Field(
        default=None,
        title="FILE",
        description="a file for the audit log: one JSON object per line for each request and decision, without texts",
        examples=["/var/log/penstock/audit.jsonl"],
    )
    audit_bytes: Size = Field(
        default="100MiB", validate_default=True, description="size at which the audit log is renamed to FILE.1"
    )
    audit_files: int = Field(default=10, gt=0, description="renamed audit logs that are kept")
    max_log_len: int | None = Field(
        default=None,
        gt=0,
        description="most characters of one prompt or item in the log; by default all",
        examples=[1000],
    )


class MetricsSettings(BaseSettings):
    """The metrics."""

    SECTION: ClassVar[str] = "Metrics"

    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="a port for /metrics alone, without a key; by default it is on --port, where a server with keys "
        "wants PENSTOCK_METRICS_KEY",
        examples=[9090],
    )
    metrics_key: CliSuppress[SecretStr | None] = Field(default=None, repr=False)
    metrics_by_key: bool = Field(
        default=False, description="count responses and tokens of each API key, by its name, or the start of its digest"
    )
