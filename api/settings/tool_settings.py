"""The settings of tools, files, prompts and webhooks, and of the prefix cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSuppress

from penstock.api.values import Duration, Size, Texts
from penstock.pipeline.hosted_kinds import kinds
from penstock.services.own_hosts import label_of
from penstock.services.standard_webhooks import Signer, checked_url
from penstock.services.web.ssrf import AllowedNetworks
from penstock.stages.normalize.tool_types import is_label, leavable, leavable_tools, named


class ToolSettings(BaseSettings):
    """The tools that the server runs for the model."""

    SECTION: ClassVar[str] = "Tools"

    mcp_config: Path | None = Field(
        default=None,
        title="FILE",
        description="a JSON file of MCP servers, in the format of most MCP clients",
        examples=["mcp.json"],
    )
    sandbox: bool = Field(
        default=True, description="run code and shell commands of the model in a sandbox, if one works on this machine"
    )
    tool: Texts = Field(
        default=[],
        title="HOST",
        description="a tool of your own, by the function that returns its host: file.py:function, module:function or "
        "the name of an entry point; the function's name is that of the tool; repeatable",
        examples=["warehouse.py:warehouse"],
    )
    allow_tool: Texts = Field(
        default=[],
        title="TOOL",
        description="a tool that clients may use: code_interpreter, shell, web_search, the name of a --tool, or none; "
        "by default all; repeatable",
        examples=["web_search"],
    )
    leave_out_tool: Texts = Field(
        default=[],
        title="TOOL",
        description=f"a tool to leave out of requests that have it: {', '.join(leavable_tools())} (all that the server "
        "does not run); otherwise a request with a tool that the server does not run gets a 400; repeatable",
        examples=["web_search"],
    )
    web_search: str | None = Field(
        default=None,
        title="ENGINE",
        description="search engine: brave, tavily, exa or searxng=URL; PENSTOCK_WEB_SEARCH_KEY holds its key",
        examples=["searxng=http://127.0.0.1:8888"],
    )
    web_search_key: CliSuppress[SecretStr | None] = Field(default=None, repr=False)
    allow_address: Texts = Field(
        default=[],
        title="ADDRESS",
        description="a network, address or host that URLs may reach although it is not public; repeatable",
        examples=["10.0.0.0/8"],
    )
    tool_timeout: Duration = Field(
        default="2m", validate_default=True, gt=0, description="time that one call of a tool may take"
    )
    container_ttl: Duration = Field(
        default="20m",
        validate_default=True,
        gt=0,
        description="time without use after which a container of the model ends",
    )
    container_memory: Literal["1g", "4g", "16g", "64g"] = Field(
        default="4g", description="the largest memory_limit of a container"
    )
    program_ttl: Duration = Field(
        default="5m",
        validate_default=True,
        gt=0,
        description="time that the process of a program waits for the client's calls; after it, the program runs again",
    )
    max_turns: int = Field(default=100, gt=0, description="turns of the model in one response")

    @property
    def tool_labels(self) -> list[str]:
        """The labels of the operator's own tools."""
        return [label_of(name) for name in self.tool]

    @field_validator("leave_out_tool")
    @classmethod
    def _leavable(cls, tools: list[str]) -> list[str]:
        leavable(tools)
        return tools

    @field_validator("tool")
    @classmethod
    def _labels(cls, names: list[str]) -> list[str]:
        labels = [label_of(name) for name in names]
        for name, label in zip(names, labels, strict=True):
            if name not in kinds().added and not is_label(label):
                raise ValueError(f"{name}: {label!r} is no name for a tool, or that of a built-in one")
            if labels.count(label) > 1:
                raise ValueError(f"there are two tools named {label}")
        return names

    @field_validator("allow_tool")
    @classmethod
    def _known_tools(cls, names: list[str], info: ValidationInfo) -> list[str]:
        named(names, [label_of(name) for name in info.data.get("tool", ())])
        return names

    @field_validator("allow_address")
    @classmethod
    def _addresses(cls, entries: list[str]) -> list[str]:
        AllowedNetworks.parse(entries)
        return entries

    @field_validator("web_search")
    @classmethod
    def _search(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"brave|tavily|exa|searxng=https?://\S+", value):
            raise ValueError("expected brave, tavily, exa or searxng=URL")
        return value

    @model_validator(mode="after")
    def _has_key(self) -> Self:
        needs_key = self.web_search is not None and not self.web_search.startswith("searxng=")
        if needs_key and self.web_search_key is None:
            raise ValueError(f"--web-search {self.web_search} needs a key: set PENSTOCK_WEB_SEARCH_KEY")
        return self


class FileSettings(BaseSettings):
    """The files of requests."""

    SECTION: ClassVar[str] = "Files"

    max_file_bytes: Size = Field(
        default="32MiB", validate_default=True, description="largest file that a request may have"
    )
    max_file_inflated: Size = Field(
        default="256MiB", validate_default=True, description="bytes to which a docx, xlsx or pptx may inflate"
    )
    max_file_pages: int = Field(default=2_000, gt=0, description="pages that a PDF may have")
    max_file_memory: Size = Field(
        default="1GiB",
        validate_default=True,
        ge=2**28,
        description="memory that the process may take that reads a file",
    )
    file_timeout: Duration = Field(
        default="20s", validate_default=True, gt=0, description="time that the process may take that reads a file"
    )


class PromptSettings(BaseSettings):
    """The prompts of the operator."""

    SECTION: ClassVar[str] = "Prompts"

    prompts: Path | None = Field(
        default=None,
        title="DIR",
        description="a folder of prompts, one Markdown file each, which requests name by `prompt`; read again at "
        "SIGHUP",
        examples=["prompts"],
    )


class WebhookSettings(BaseSettings):
    """The receiver of webhooks."""

    SECTION: ClassVar[str] = "Webhooks"

    webhook: str | None = Field(
        default=None,
        title="URL",
        description="a URL that learns of the end of each background response; PENSTOCK_WEBHOOK_SECRET signs what it "
        "gets; public, or one of --allow-address",
        examples=["https://example.com/hooks"],
    )
    webhook_secret: CliSuppress[SecretStr | None] = Field(default=None, repr=False)

    @field_validator("webhook")
    @classmethod
    def _receives(cls, url: str | None) -> str | None:
        return url and checked_url(url)

    @field_validator("webhook_secret")
    @classmethod
    def _signs(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret:
            Signer.of(secret.get_secret_value())
        return secret

    @model_validator(mode="after")
    def _has_secret(self) -> Self:
        if self.webhook is not None and self.webhook_secret is None:
            raise ValueError("--webhook needs a secret: set PENSTOCK_WEBHOOK_SECRET")
        return self


class CacheSettings(BaseSettings):
    """The engine's prefix cache."""

    SECTION: ClassVar[str] = "Prefix cache"

    share_caches: bool = Field(
        default=False,
        description="share the engine's prefix cache among API keys: a client can then confirm guesses of prompts",
    )
    salt_caches: bool = Field(
        default=False, description="share the engine's prefix cache only among requests with the same prompt_cache_key"
    )
