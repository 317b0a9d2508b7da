"""The settings of the engine, and of models with a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, CliSuppress, CliUnknownArgs

from penstock.api.settings.sources import flags, unknown_option
from penstock.api.values import Duration, Table, Texts
from penstock.services.engines.vllm import option_names
from penstock.stages.models.chat.load import ChatOptions

DEFAULT_MODEL = "openai/gpt-oss-20b"

REPLAY = "replay:"
"""The prefix of a folder of recordings that answer in place of an engine."""

FACTORY = r"(?!replay:)[^:]+:[A-Za-z_][\w.]*"
"""The form of the name of a function that makes an engine; a URL has ``//`` after its colon."""


def speed(value: Any) -> Any:
    """Return ``2`` for ``2x``, and None for ``max``; leave anything else to pydantic."""
    return None if value == "max" else value.removesuffix("x") if isinstance(value, str) else value


def http_urls(urls: list[str], otherwise: str = "") -> list[str]:
    """Return the URLs; raise `ValueError` for the first that is not one of HTTP, ``otherwise`` in its message."""
    for url in urls:
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
            shown = re.sub("//[^/@]*@", "//...@", url)  # without a key
            raise ValueError(f"{shown} must begin with http:// or https://, and name a host{otherwise}")
    return urls


class ModelEngineSettings(BaseModel):
    """A model, and the engine that runs it."""

    SECTION: ClassVar[str] = "Engine"

    # The titles stand for the values in the help; the examples in mistakes, and without a default in `penstock config`.
    model: CliPositionalArg[str | None] = Field(
        default=None,
        title="MODEL",
        description=f"a Hugging Face id or a folder; by default {DEFAULT_MODEL}, or the model of --engine",
        examples=[DEFAULT_MODEL],
    )
    engine: Texts = Field(
        default=[],
        title="URL",
        description="URL of a vLLM server that generates; repeat it for replicas. Or replay:DIR, for recordings; "
        "or file.py:function or module:function, for an engine of your own",
        examples=["http://127.0.0.1:8001"],
    )
    kv_events: Texts = Field(
        default=[],
        title="ADDRESS",
        description="ZeroMQ address of an engine's KV events, one for each --engine and in their order: turns then go "
        "to engines whose prefix caches hold their prompts; needs the extra kv-events",
        examples=["tcp://gpu1:5557"],
    )
    engine_places: int | None = Field(
        default=None,
        gt=0,
        description="turns of the model that generate at once; others wait, and the API keys get places in turn; "
        "by default --max-num-seqs of vLLM in this process, and any number with --engine",
        examples=[64],
    )
    engine_wait: Duration | None = Field(
        default=None,
        gt=0,
        title="TIME",
        description="time that a new response may wait for a place before it is refused with a 503; by default any",
        examples=["30s"],
    )
    shadow: Texts = Field(
        default=[],
        title="URL",
        description="URL of a vLLM server that reads a share of the answers again, after their clients have them, and "
        "says which tokens it would have changed; repeat it for replicas",
        examples=["http://127.0.0.1:8002"],
    )
    shadow_share: float = Field(default=0.05, gt=0, le=1, title="SHARE", description="share of the turns for --shadow")
    hints: bool = Field(
        default=False,
        description="tell the engine which conversations wait for a tool, and which are over, so that its cache keeps "
        "what comes next",
    )
    engine_key: CliSuppress[SecretStr | None] = Field(default=None, repr=False)
    shadow_key: CliSuppress[SecretStr | None] = Field(default=None, repr=False)
    vllm: CliSuppress[Table] = {}

    @field_validator("engine")
    @classmethod
    def _engines(cls, urls: list[str]) -> list[str]:
        if any(url.startswith(REPLAY) for url in urls):
            if len(urls) > 1:
                raise ValueError(f"{REPLAY}DIR cannot be combined with other engines")
            if urls == [REPLAY]:
                raise ValueError(f"{REPLAY}DIR needs a folder")
            return urls
        if len(urls) == 1 and re.fullmatch(FACTORY, urls[0]):
            return urls
        return http_urls(urls, ", or be file.py:function")

    @field_validator("kv_events")
    @classmethod
    def _event_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            port = re.fullmatch(r"tcp://[^\s/*]+:(\d{1,5})|ipc://\S+", address)
            if not port or not 0 < int(port[1] or 1) < 2**16:
                raise ValueError(f"{address} must have the form tcp://HOST:PORT or ipc://PATH")
        return addresses

    @field_validator("shadow")
    @classmethod
    def _shadows(cls, urls: list[str]) -> list[str]:
        return http_urls(urls)

    @model_validator(mode="after")
    def _events_of_each_engine(self) -> Self:
        if self.kv_events and len(self.kv_events) != len(self.engine):
            raise ValueError(f"--kv-events: {len(self.kv_events)} addresses for {len(self.engine)} --engine")
        if self.kv_events and len({url.rstrip("/") for url in self.engine}) < len(self.engine):
            raise ValueError("--kv-events: an --engine is named twice")
        return self

    @property
    def option_tables(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of plug-ins that have options of their own, each under the name of its entry point."""
        if not self.shadow:
            return {}
        return {"shadow": {"urls": self.shadow, "share": self.shadow_share, "key": self.shadow_key}}

    @property
    def recordings(self) -> Path | None:
        """The folder of recordings to answer from; None if an engine generates."""
        folders = [Path(engine.removeprefix(REPLAY)) for engine in self.engine if engine.startswith(REPLAY)]
        return folders[0] if folders else None

    @property
    def engine_factory(self) -> str | None:
        """The function that makes an engine of the operator's own, as ``file.py:function`` or ``module:function``."""
        return self.engine[0] if self.engine and re.fullmatch(FACTORY, self.engine[0]) else None


class EngineSettings(ModelEngineSettings, BaseSettings):
    """The engine of a server, with its settings that are not of a model alone."""

    SECTION: ClassVar[str] = "Engine"

    model_alias: Texts = Field(
        default=[],
        title="PATTERN=NAME",
        description="other names for a served model: a request for a name that fits the pattern (as in a shell) is "
        "for the model NAME, and its answer has the name of the request; repeatable, the first that fits counts",
        examples=["claude-*=openai/gpt-oss-20b"],
    )
    replay_speed: Annotated[float | None, BeforeValidator(speed)] = Field(
        default="max",
        validate_default=True,
        gt=0,
        allow_inf_nan=False,
        title="SPEED",
        description="speed at which recordings are played back: 1x is the recorded speed, 2x twice that, or max",
        examples=["2x"],
    )
    exit_with_engine: bool = Field(
        default=False,
        description="end with status 1 when an engine in this process dies, so that systemd or Docker start the server "
        "again; without it the server goes on with its stored responses, and /health returns a 503",
    )
    weights_from: Path | None = Field(
        default=None,
        title="FOLDER",
        description="let a trainer change the weights of the model in this process by vLLM's routes, with the "
        "operator's key; FOLDER has the checkpoints that it may load",
        examples=["checkpoints"],
    )
    engine_arguments: CliUnknownArgs = []

    @field_validator("model_alias")
    @classmethod
    def _aliases(cls, aliases: list[str]) -> list[str]:
        patterns = [alias.partition("=")[0] for alias in aliases]
        for alias, pattern in zip(aliases, patterns, strict=True):
            if not all(alias.partition("=")):
                raise ValueError(f"{alias!r} is not a pattern and a model: write claude-*=NAME")
            if patterns.count(pattern) > 1:
                raise ValueError(f"{pattern} stands for two models")
        return aliases

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if any(option.split("=")[0] == "--model" for option in self.engine_options):
            raise ValueError("give MODEL as the first argument, or as model before the tables of penstock.toml")
        return self

    @model_validator(mode="after")
    def _engine_is_elsewhere(self) -> Self:
        if self.engine and self.engine_arguments:
            typed = [argument.split("=")[0] for argument in self.engine_arguments]
            refused = [name for name in typed if name.startswith("-")] or typed[:1]
            remote = "options of vLLM's engine belong to the engine's own server, as --engine names another one"
            own = "options of vLLM's engine have no effect on an engine of your own"
            known, of_vllm = flags(type(self).model_fields), option_names()
            reasons = {
                name: "" if _documented(name) in of_vllm else f"{unknown_option(name, [*known, *of_vllm])}; "
                for name in refused
            }
            advice = own if self.engine_factory else remote
            raise ValueError("\n".join(f"{name}: {reason}{advice}" for name, reason in reasons.items()))
        return self

    @property
    def engine_options(self) -> list[str]:
        """The options of vLLM: those of the command line, after those of the table ``[vllm]`` that it leaves."""
        typed = {_documented(argument.split("=")[0]) for argument in self.engine_arguments}
        left = ((name, value) for name, value in self.vllm.items() if f"--{name.replace('_', '-')}" not in typed)
        return [part for name, value in left for part in _option(name, value)] + self.engine_arguments

    @property
    def aliases(self) -> dict[str, str]:
        """The patterns of other names for models, each with the name of a model."""
        return {pattern: model for pattern, _, model in (alias.partition("=") for alias in self.model_alias)}


class ChatSettings(BaseModel):
    """Models with a chat template, and the instructions of gpt-oss."""

    SECTION: ClassVar[str] = "Models with a chat template, and gpt-oss"

    reasoning_parser: str | None = Field(
        default=None,
        title="NAME",
        description="vLLM's parser of reasoning, or none; by default chosen by the chat template. Or file.py:name, "
        "module:name or an entry point, for a parser of your own",
        examples=["qwen3"],
    )
    tool_call_parser: str | None = Field(
        default=None,
        title="NAME",
        description="vLLM's parser of calls, or none; by default chosen by the chat template. Or file.py:name, "
        "module:name or an entry point, for a parser of your own",
        examples=["hermes"],
    )
    reasoning_parser_plugin: str | None = Field(
        default=None,
        title="FILE",
        description="a file or module that registers a parser of reasoning with vLLM",
        examples=["reasoning.py"],
    )
    tool_parser_plugin: str | None = Field(
        default=None,
        title="FILE",
        description="a file or module that registers a parser of calls with vLLM",
        examples=["calls.py"],
    )
    chat_template: str | None = Field(
        default=None,
        title="FILE",
        description="a file with a chat template, or the template itself, instead of the model's own",
        examples=["template.jinja"],
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        default="auto",
        description="format in which the template takes the content of messages: string, or openai for a list of parts",
    )
    default_chat_template_kwargs: Table = Field(
        default={},
        description='variables of the chat template; as JSON, {"enable_thinking": false}, except in penstock.toml',
        examples=[{"enable_thinking": False}],
    )
    trust_request_chat_template: bool = Field(default=False, description="accept the chat_template of a request")
    tool_strict_level: Literal["auto", "function", "parameter"] = Field(
        default="auto",
        description="hold calls that a request leaves free: function their markup and names, parameter also the "
        "arguments of functions",
    )
    harmony_system_instructions: bool = Field(
        default=False,
        description="give gpt-oss the instructions in its system message, instead of the developer message",
    )

    @property
    def chat(self) -> ChatOptions:
        """The options of a model with a chat template."""
        return ChatOptions(
            self.reasoning_parser,
            tool_call_parser=self.tool_call_parser,
            chat_template=self.chat_template,
            chat_template_content_format=self.chat_template_content_format,
            default_chat_template_kwargs=self.default_chat_template_kwargs,
            trust_request_chat_template=self.trust_request_chat_template,
            reasoning_parser_plugin=self.reasoning_parser_plugin,
            tool_parser_plugin=self.tool_parser_plugin,
        )


def _option(name: str, value: Any) -> list[str]:
    """Return an option of vLLM's command line, for an entry of the table ``[vllm]``."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, list):
        return [f"--{option}", *map(_text, value)]
    return [f"--{option}={_text(value)}"]


def _documented(option: str) -> str:
    """Return an option of vLLM as it is documented: it may be typed with underscores, or as its opposite."""
    return option.replace("_", "-").replace("--no-", "--", 1)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
