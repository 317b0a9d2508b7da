"""The settings of ``penstock serve``, from the command line, the environment, or ``penstock.toml``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSuppress,
    CliUnknownArgs,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from penstock.api.sources import FILE, PREFIX, flags, keys, read_file, unknown_option, unknown_variables
from penstock.pipeline.recordings.format import FILES
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.normalize.tool_types import LEAVABLE, leavable, named
from penstock.stages.services.engines.vllm import option_names
from penstock.stages.services.web.ssrf import AllowedNetworks

DEFAULT_MODEL = "openai/gpt-oss-20b"

NO_STORE = "none"
"""The value of ``--store`` for a server that stores nothing."""

ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The hosts that mean all addresses of a machine, each with the address at which the machine reaches itself."""

REPLAY = "replay:"
"""The prefix of a folder of recordings that answer in place of an engine."""

FACTORY = r"(?!replay:)[^:]+:[A-Za-z_][\w.]*"
"""The form of the name of a function that makes an engine; a URL has ``//`` after its colon."""

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def seconds(value: Any) -> Any:
    """Return the seconds of ``30d``, ``12h``, ``5m``, ``90s`` or ``90``, or a number as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", str(value))):
        raise ValueError(f"expected a duration, such as 30d, 12h, 5m or 90s, not {value!r}")
    return float(match[1]) * _UNITS[match[2]]


def size(value: Any) -> Any:
    """Return the bytes of ``32MiB`` or ``33554432``; leave anything else to pydantic."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]iB)?\s*", value) if isinstance(value, str) else None
    return int(match[1]) * _SIZES[match[2] or ""] if match else value


def frontend_count(value: Any) -> Any:
    """Return the number of frontends for ``auto``; leave anything else to pydantic."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2)) if value == "auto" else value


def in_capitals(value: Any) -> Any:
    """Return a text in capitals; leave anything else to pydantic."""
    return value.upper() if isinstance(value, str) else value


def speed(value: Any) -> Any:
    """Return ``2`` for ``2x``, and None for ``max``; leave anything else to pydantic."""
    return None if value == "max" else value.removesuffix("x") if isinstance(value, str) else value


def listed(value: Any) -> Any:
    """Return the entries of ``a,b`` or of a JSON list; leave what is no text to pydantic."""
    if not isinstance(value, str):
        return value
    is_json = re.match(r'\s*\[\s*["\]]', value)  # and not an address as in [::1]
    return decoded(value) if is_json else [part.strip() for part in value.split(",") if part.strip()]


def decoded(value: Any) -> Any:
    """Return the value of a JSON text; leave anything else to pydantic."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from error


Duration = Annotated[float, BeforeValidator(seconds), Field(ge=0, allow_inf_nan=False, title="TIME")]
"""A duration in seconds; as text it may have one of the units ``s``, ``m``, ``h`` and ``d``."""

Texts = Annotated[list[str], NoDecode, BeforeValidator(listed)]
"""A list, whose text is one entry, entries with commas between them, or JSON."""

Table = Annotated[dict[str, Any], NoDecode, BeforeValidator(decoded), Field(title="JSON")]
"""A table, whose text is JSON."""


def _is_here(host: str) -> bool:
    """True if other machines cannot reach this one under ``host``."""
    return host in ANY or host in ("localhost", "::1") or host.startswith("127.")


def _is_stored_here(store: str) -> bool:
    """True if the store is on this machine: a file, or a database at a local address or socket."""
    url = urlsplit(store)
    hosts = (url.hostname or "", *parse_qs(url.query).get("host", ()))
    return all(_is_here(host) or host.startswith("/") for host in hosts)


_CODE = re.compile(r".*\.py(:.*)?|[\w.]+:[\w.]+")
"""A Python file, or the function of one or of a module, as ``--engine`` and ``--with`` take them."""


def store_place(store: str) -> str:
    """Return the place of a store, with the home folder of ``~``; raise `ValueError` if there is no such store."""
    is_database = store.startswith(("postgresql://", "postgres://"))
    if not is_database and ("://" in store or re.match("postgres(ql)?:?//", store)):
        raise ValueError("give the path of a file, postgresql://..., or none")
    if not is_database and _CODE.fullmatch(store):
        raise ValueError("there are two stores, SQLite and PostgreSQL: give the path of a file, or postgresql://...")
    return store if is_database else os.path.expanduser(store)  # noqa: PTH111 (a path would lose the dot of ./)


def _data_folder() -> Path:
    """Return the folder for a user's data, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "penstock"


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


OF_VLLM = {
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "harmony_system_instructions",
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": "allow_tool",
}
"""The settings that are also environment variables of vLLM."""


class Settings(BaseSettings):
    """Serve MODEL. Options that are not listed here go to vLLM's engine: write MODEL before them."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_prefix_target="all",
        cli_prog_name="penstock serve",
        cli_exit_on_error=False,
        cli_kebab_case=True,
        cli_ignore_unknown_args=True,
        cli_implicit_flags=True,
        cli_shortcuts={"verbose": "v"},
        extra="forbid",
        hide_input_in_errors=True,
    )

    # The titles stand for the values in the help; the examples in mistakes, and without a default in `penstock config`.
    model: CliPositionalArg[str | None] = Field(
        None,
        title="MODEL",
        description=f"a Hugging Face id or a folder; by default {DEFAULT_MODEL}, or the model of --engine",
        examples=[DEFAULT_MODEL],
    )
    engine: Texts = Field(
        [],
        title="URL",
        description="URL of a vLLM server that generates; repeat it for replicas. Or replay:DIR, for recordings; "
        "or file.py:function or module:function, for an engine of your own",
        examples=["http://127.0.0.1:8001"],
    )
    replay_speed: Annotated[float | None, BeforeValidator(speed)] = Field(
        "max",
        validate_default=True,
        gt=0,
        allow_inf_nan=False,
        title="SPEED",
        description="speed at which recordings are played back: 1x is the recorded speed, 2x twice that, or max",
        examples=["2x"],
    )
    engine_places: int | None = Field(
        None,
        gt=0,
        description="turns of the model that generate at once; others wait, and the API keys get places in turn; "
        "by default --max-num-seqs of vLLM in this process, and any number with --engine",
        examples=[64],
    )
    engine_wait: Duration | None = Field(
        None,
        gt=0,
        title="TIME",
        description="time that a new response may wait for a place before it is refused with a 503; by default any",
        examples=["30s"],
    )
    engine_key: CliSuppress[SecretStr | None] = Field(None, repr=False)
    reasoning_parser: str | None = Field(
        None,
        title="NAME",
        description="vLLM's parser of reasoning, or none; by default chosen by the chat template",
        examples=["qwen3"],
    )
    tool_call_parser: str | None = Field(
        None,
        title="NAME",
        description="vLLM's parser of calls, or none; by default chosen by the chat template",
        examples=["hermes"],
    )
    chat_template: str | None = Field(
        None,
        title="FILE",
        description="a file with a chat template, or the template itself, instead of the model's own",
        examples=["template.jinja"],
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto",
        description="format in which the template takes the content of messages: string, or openai for a list of parts",
    )
    default_chat_template_kwargs: Table = Field(
        {},
        description='variables of the chat template; as JSON, {"enable_thinking": false}, except in penstock.toml',
        examples=[{"enable_thinking": False}],
    )
    trust_request_chat_template: bool = Field(False, description="accept the chat_template of a request")
    harmony_system_instructions: bool = Field(
        False, description="give gpt-oss the instructions in its system message, instead of the developer message"
    )
    vllm: CliSuppress[Table] = {}
    host: str = Field("127.0.0.1", title="HOST", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on")
    frontends: Annotated[int, BeforeValidator(frontend_count)] = Field(
        1,
        gt=0,
        title="N",
        description="server processes on one engine and one port; auto means one for every two cores, 8 at most",
        examples=["auto"],
    )
    max_body_bytes: Annotated[int, BeforeValidator(size)] = Field(
        "32MiB",
        validate_default=True,
        gt=0,
        title="SIZE",
        description="largest request body; larger ones, and bodies with more than a million commas, are a 413",
    )
    keep_alive: Duration = Field(
        "15s",
        validate_default=True,
        gt=0,
        description="time of silence after which a stream gets a comment, so that no proxy closes it",
    )
    drain_timeout: Duration = Field(
        "20s",
        validate_default=True,
        description="time that running responses get after SIGTERM; then they end as failed",
    )
    api_key_file: Path | None = Field(
        None,
        title="FILE",
        description="a file of API keys, one per line; PENSTOCK_API_KEYS holds keys as well",
        examples=["/etc/penstock/keys"],
    )
    api_keys: CliSuppress[Annotated[str | tuple[str, ...] | None, NoDecode]] = Field(None, repr=False)
    store_keys: bool = Field(False, description="read API keys from the store, too; penstock keys makes them")
    limits: Path | None = Field(
        None,
        title="FILE",
        description="a TOML file of limits for API keys: requests, tokens, responses at once, weights; read again at "
        "SIGHUP",
        examples=["/etc/penstock/limits.toml"],
    )
    seal_key_file: Path | None = Field(
        None,
        title="FILE",
        description="a file of keys, one per line, that seal what clients keep: the first seals, all open; "
        "PENSTOCK_SEAL_KEYS holds keys as well; by default a key in the store",
        examples=["/etc/penstock/seal-keys"],
    )
    seal_keys: CliSuppress[Annotated[str | tuple[str, ...] | None, NoDecode]] = Field(None, repr=False)
    allow_host: Texts = Field(
        [],
        title="NAME",
        description="a name of this server besides addresses, localhost and --host, if it has no keys; repeatable",
        examples=["gpubox"],
    )
    allow_origin: Texts = Field(
        [],
        title="ORIGIN",
        description="an origin whose web pages may use this server, or * for all; repeatable",
        examples=["https://chat.example"],
    )
    store: str = Field(
        default_factory=lambda: str(_data_folder() / "responses.sqlite3"),
        title="STORE",
        description="the SQLite file that stores responses, a PostgreSQL database (postgresql://...), or none",
    )
    store_ttl: Duration = Field("30d", validate_default=True, description="time for which responses are stored")
    stream_ttl: Duration = Field(
        "1d", validate_default=True, description="time for which the events of their streams are stored"
    )
    max_background: int = Field(64, gt=0, description="background responses that run at once; the others wait in order")
    resume_interrupted: bool = Field(
        False,
        description="run interrupted background responses of a dead server again, instead of ending them as failed",
    )
    detach: bool = Field(False, description="let a stored response go on if its client disconnects")
    peer_url: str | None = Field(
        None,
        validate_default=True,
        title="URL",
        description="URL at which the other servers of the store reach this one; by default http://HOST:PORT",
        examples=["http://10.0.0.2:8000"],
    )
    heartbeat: Duration = Field(
        "2s", validate_default=True, gt=0, description="time between two heartbeats in the store"
    )
    stale_after: Duration = Field(
        "15s", validate_default=True, gt=0, description="time without a heartbeat after which a server counts as dead"
    )
    mcp_config: Path | None = Field(
        None,
        title="FILE",
        description="a JSON file of MCP servers, in the format of most MCP clients",
        examples=["mcp.json"],
    )
    sandbox: bool = Field(
        True, description="run code and shell commands of the model in a sandbox, if one works on this machine"
    )
    allow_tool: Texts = Field(
        [],
        title="TOOL",
        description="a built-in tool that clients may use: code_interpreter, shell, web_search or none; "
        "by default all; repeatable",
        examples=["web_search"],
    )
    leave_out_tool: Texts = Field(
        [],
        title="TOOL",
        description=f"a tool to leave out of requests that have it: {', '.join(LEAVABLE)}; otherwise a request "
        "with a tool that the server does not run is a 400; repeatable",
        examples=["web_search"],
    )
    web_search: str | None = Field(
        None,
        title="ENGINE",
        description="search engine: brave, tavily, exa or searxng=URL; PENSTOCK_WEB_SEARCH_KEY holds its key",
        examples=["searxng=http://127.0.0.1:8888"],
    )
    web_search_key: CliSuppress[SecretStr | None] = Field(None, repr=False)
    allow_address: Texts = Field(
        [],
        title="ADDRESS",
        description="a network, address or host that URLs may reach although it is not public; repeatable",
        examples=["10.0.0.0/8"],
    )
    tool_timeout: Duration = Field(
        "2m", validate_default=True, gt=0, description="time that one call of a tool may take"
    )
    max_turns: int = Field(100, gt=0, description="turns of the model in one response")
    share_caches: bool = Field(
        False,
        description="share the engine's prefix cache among API keys: a client can then confirm guesses of prompts",
    )
    salt_caches: bool = Field(
        False, description="share the engine's prefix cache only among requests with the same prompt_cache_key"
    )
    with_: Texts = Field(
        [],
        alias="with",
        title="STAGE",
        description="a stage of your own: file.py:function, module:function or the name of an entry point; repeatable",
        examples=["shout.py:install"],
    )
    print_pipeline: bool = Field(False, description="draw the pipeline of the model, and exit")
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(in_capitals)] = Field(
        "INFO", description="least level of log lines"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="lines for people, or one JSON object per line; SIGUSR1 switches DEBUG on and off"
    )
    verbose: bool = Field(False, description="show the lines of vLLM, also those that are only about its progress")
    slow_callback: Duration = Field(
        "0.25s",
        validate_default=True,
        description="time for which code may hold the event loop before the log names it; 0: never",
    )
    log_prompts: bool = Field(False, description="log the prompt of each turn, with its sampling parameters")
    log_outputs: bool = Field(False, description="log the output of the model, item by item; reasoning is marked")
    max_log_len: int | None = Field(
        None, gt=0, description="most characters of one prompt or item in the log; by default all", examples=[1000]
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="a port for /metrics alone, without a key; by default it is on --port, where a server with keys "
        "wants PENSTOCK_METRICS_KEY",
        examples=[9090],
    )
    metrics_key: CliSuppress[SecretStr | None] = Field(None, repr=False)
    metrics_by_key: bool = Field(
        False, description="count responses and tokens of each API key, named by the start of its digest"
    )
    record: Path | None = Field(
        None, title="FOLDER", description="a folder that gets one recording per response", examples=["recordings"]
    )
    record_after: Annotated[tuple[str, ...], NoDecode, BeforeValidator(listed)] = Field(
        ",".join(FILES), validate_default=True, title="STAGES", description="the stages whose output is recorded"
    )
    record_if: str | None = Field(
        None,
        title="CONDITION",
        description="record a fraction of responses (0.01), or those with a request header (x-record, x-record=yes)",
        examples=["0.01"],
    )
    record_texts: bool = Field(True, description="record texts; without them only their shape")
    engine_arguments: CliUnknownArgs = []

    @field_validator("store")
    @classmethod
    def _store(cls, store: str) -> str:
        return store_place(store)

    @field_validator("peer_url")
    @classmethod
    def _reachable(cls, url: str | None, others: ValidationInfo) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
            raise ValueError("it must begin with http:// or https://, and name a host")
        if url is None and _is_here(others.data.get("host", "")) and not _is_stored_here(others.data.get("store", "")):
            raise ValueError("the store is on another machine: give the URL at which its other servers reach this one")
        return url

    @field_validator("allow_host")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"{name!r} is not the name of a host: leave out scheme and port")
        return names

    @field_validator("allow_origin")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+/?", origin, re.IGNORECASE):
                raise ValueError(f"{origin!r} is not an origin: it needs a scheme, a host, and a port if it has one")
        return origins

    @field_validator("leave_out_tool")
    @classmethod
    def _leavable(cls, tools: list[str]) -> list[str]:
        leavable(tools)
        return tools

    @field_validator("allow_tool")
    @classmethod
    def _known_tools(cls, names: list[str]) -> list[str]:
        named(names)
        return names

    @field_validator("allow_address")
    @classmethod
    def _addresses(cls, entries: list[str]) -> list[str]:
        AllowedNetworks.parse(entries)
        return entries

    @field_validator("record", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        if value == "":  # as a path it would be the working directory
            raise ValueError("it is empty: give a folder")
        return value

    @field_validator("record_after")
    @classmethod
    def _stages(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [stage for stage in stages if stage not in FILES]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(FILES)}")
        return stages

    @field_validator("web_search")
    @classmethod
    def _search(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"brave|tavily|exa|searxng=https?://\S+", value):
            raise ValueError("expected brave, tavily, exa or searxng=URL")
        return value

    @field_validator("record_if")
    @classmethod
    def _condition(cls, value: str | None) -> str | None:
        if value is not None:
            Condition.parse(value)
        return value

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
        for url in urls:
            if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
                shown = re.sub("//[^/@]*@", "//...@", url)  # without a key
                raise ValueError(
                    f"{shown} must begin with http:// or https://, and name a host, or be file.py:function"
                )
        return urls

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

    @model_validator(mode="after")
    def _has_key(self) -> Self:
        needs_key = self.web_search is not None and not self.web_search.startswith("searxng=")
        if needs_key and self.web_search_key is None:
            raise ValueError(f"--web-search {self.web_search} needs a key: set PENSTOCK_WEB_SEARCH_KEY")
        return self

    @model_validator(mode="after")
    def _has_store_of_keys(self) -> Self:
        if self.store_keys and self.store == NO_STORE:
            raise ValueError("--store-keys needs a store")
        return self

    @model_validator(mode="after")
    def _has_parts(self) -> Self:
        if self.max_background < self.frontends:
            raise ValueError("--max-background must be at least --frontends, as each frontend has a part of it")
        return self

    @property
    def engine_options(self) -> list[str]:
        """The options of vLLM: those of the command line, after those of the table ``[vllm]`` that it leaves."""
        typed = {_documented(argument.split("=")[0]) for argument in self.engine_arguments}
        left = ((name, value) for name, value in self.vllm.items() if f"--{name.replace('_', '-')}" not in typed)
        return [part for name, value in left for part in _option(name, value)] + self.engine_arguments

    @property
    def recordings(self) -> Path | None:
        """The folder of recordings to answer from; None if an engine generates."""
        folders = [Path(engine.removeprefix(REPLAY)) for engine in self.engine if engine.startswith(REPLAY)]
        return folders[0] if folders else None

    @property
    def engine_factory(self) -> str | None:
        """The function that makes an engine of the operator's own, as ``file.py:function`` or ``module:function``."""
        return self.engine[0] if self.engine and re.fullmatch(FACTORY, self.engine[0]) else None

    @property
    def has_keys(self) -> bool:
        """True if a request needs an API key."""
        return self.api_key_file is not None or self.api_keys is not None or self.store_keys

    @property
    def is_open(self) -> bool:
        """True if other machines can use the server without a key."""
        return not self.has_keys and (self.host in ANY or not _is_here(self.host))

    @property
    def recorded_if(self) -> Condition:
        """The condition under which a response is recorded."""
        return ALWAYS if self.record_if is None else Condition.parse(self.record_if)

    @property
    def chat(self) -> ChatOptions:
        """The options of a model with a chat template."""
        return ChatOptions(
            self.reasoning_parser,
            self.tool_call_parser,
            self.chat_template,
            self.chat_template_content_format,
            self.default_chat_template_kwargs,
            self.trust_request_chat_template,
        )

    @property
    def stale(self) -> float:
        """Seconds without a heartbeat after which a server is dead: at least five periods, as a beat may be late."""
        return max(self.stale_after, 5 * self.heartbeat)

    def url(self, port: int) -> str:
        """Return the URL at which its own machine reaches this server, which listens on ``port``."""
        host = ANY.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def reached_at(self, port: int) -> str:
        """Return the URL at which the other servers of the store reach this one, which listens on ``port``."""
        return self.peer_url or self.url(port)

    def frontend_at(self, port: int) -> str:
        """Return the URL at which the other servers of the store reach one frontend, which listens on ``port``."""
        if self.peer_url is None:
            return f"http://127.0.0.1:{port}"
        parts = urlsplit(self.peer_url)
        host = parts.hostname or ""
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def called(self, url: str) -> list[str]:
        """Return the names of this server for the clients of a server without keys, which peers reach at ``url``."""
        return [*self.allow_host, self.host, urlsplit(url).hostname or ""]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Prefer the command line to the environment, and both to ``penstock.toml`` in the working directory.

        Unknown keys of either are kept, so that they are refused.

        A variable of vLLM counts if none of them has its setting.
        """
        of_vllm = {name: os.environ[variable] for variable, name in OF_VLLM.items() if variable in os.environ}
        known = keys(cls.model_fields)
        others = unknown_variables(known), read_file(FILE, known), of_vllm
        return init_settings, env_settings, *(InitSettingsSource(settings_cls, other) for other in others)
