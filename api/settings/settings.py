"""The settings of ``penstock serve``, from the command line, the environment, or ``penstock.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from secrets import token_urlsafe
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import PrivateAttr, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.api.http.http_settings import ANY, ClientSettings, HttpSettings, is_here, is_loopback
from penstock.api.metrics.log_settings import LogSettings, MetricsSettings
from penstock.api.runs.batch_settings import BatchSettings
from penstock.api.runs.store_settings import NO_STORE, ServersSettings, StoreSettings, is_stored_here
from penstock.api.settings.accounts_settings import AccountsSettings
from penstock.api.settings.engine_settings import EngineSettings
from penstock.api.settings.model_settings import SHARED, ModelsSettings, check_tools
from penstock.api.settings.recording_settings import RecordingSettings
from penstock.api.settings.rollout_settings import RolloutSettings
from penstock.api.settings.sources import FILE, PREFIX, check_keywords, keys, read_file, unknown_variables
from penstock.api.settings.stage_settings import StageSettings, StageTables
from penstock.api.settings.tool_settings import (
    CacheSettings,
    FileSettings,
    PromptSettings,
    ToolSettings,
    WebhookSettings,
)

OF_VLLM = {
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "harmony_system_instructions",
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": "allow_tool",
}
"""The settings that are also environment variables of vLLM."""


class Settings(  # pydantic begins with the fields of the last class
    RolloutSettings,
    RecordingSettings,
    MetricsSettings,
    LogSettings,
    StageTables,
    StageSettings,
    CacheSettings,
    PromptSettings,
    WebhookSettings,
    FileSettings,
    ToolSettings,
    AccountsSettings,
    BatchSettings,
    ServersSettings,
    StoreSettings,
    ClientSettings,
    HttpSettings,
    ModelsSettings,
    EngineSettings,
):
    """Serve MODEL, with vLLM in this process or at --engine. Write MODEL before the options of vLLM."""

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

    _key_of_run: str = PrivateAttr(default="")
    """The key of the operator that this run has made, for the terminal that started it."""

    def __new__(cls, /, **given: Any) -> Self:
        """Raise `TypeError` for a keyword that is no setting.  Only a program gives keywords."""
        check_keywords(given, cls.model_fields)
        return super().__new__(cls)

    @field_validator("peer_url")
    @classmethod
    def _is_reached(cls, url: str | None, others: ValidationInfo) -> str | None:
        if url is None and is_here(others.data.get("host", "")) and not is_stored_here(others.data.get("store", "")):
            raise ValueError("the store is on another machine: give the URL at which its other servers reach this one")
        return url

    @model_validator(mode="after")
    def _has_store_of_keys(self) -> Self:
        if self.store_keys and self.store == NO_STORE:
            raise ValueError("--store-keys needs a store")
        return self

    @model_validator(mode="after")
    def _has_store_of_webhooks(self) -> Self:
        if self.webhook and self.store == NO_STORE:
            raise ValueError("--webhook needs a store")
        return self

    @model_validator(mode="after")
    def _has_recordings_of_rollouts(self) -> Self:
        if self.rollouts_to is not None and self.record is None:
            raise ValueError("--rollouts-to needs --record")
        if self.rollouts_to is not None and self.rollouts_folder is None and self.webhook_secret is None:
            raise ValueError("--rollouts-to needs a secret for a URL: set PENSTOCK_WEBHOOK_SECRET")
        return self

    @model_validator(mode="after")
    def _has_parts(self) -> Self:
        if self.max_background < self.frontends:
            raise ValueError("--max-background must be at least --frontends, because it is divided among the frontends")
        return self

    @model_validator(mode="after")
    def _makes_key(self) -> Self:
        if self.live and self.operator_key is None and is_loopback(self.host):
            self._key_of_run = token_urlsafe(16)
            self.operator_key = SecretStr(self._key_of_run)
        return self

    @model_validator(mode="after")
    def _models_stand_alone(self) -> Self:
        if not self.models:
            return self
        beside = {"model": self.model, "engine": self.engine, "kv-events": self.kv_events}
        for option in (name for name, value in beside.items() if value):
            raise ValueError(f"--{option}: the tables of models name all models: write it into a table of its own")
        if self.frontends > 1:
            raise ValueError("--frontends: several models need one process")
        if self.engine_arguments and not self.in_this_process:
            raise ValueError(f"{self.engine_arguments[0]}: no model runs in this process: write it into its command")
        return self

    @model_validator(mode="after")
    def _models_have_known_tools(self) -> Self:
        check_tools(self.models, self.tool_labels, self.places)
        return self

    def of_model(self, name: str) -> Self:
        """Return the settings of one of the models, as if the server had no other."""
        table = self.models[name]
        own = {key: getattr(table, key) for key in SHARED & table.model_fields_set}
        alone = self.model_copy(update={"models": {}, "model_file": None, "model_groups": {}, **own})
        if not table.is_here:  # options of vLLM are for the model that it runs in this process
            alone.vllm, alone.engine_arguments = {}, []
            alone.model_fields_set.difference_update({"vllm", "engine_arguments"})
        return alone

    @property
    def in_this_process(self) -> Self | None:
        """The settings of the model that vLLM runs in this process; None if there is none."""
        if not self.models:
            return None if self.engine else self
        return next((self.of_model(name) for name, table in self.models.items() if table.is_here), None)

    @property
    def plugins(self) -> list[str]:
        """The plug-ins in their order: those of ``--with``, and then those that have options of their own."""
        hints = ["hints"] if self.hints else []  # before a shadow, behind which no engine is seen
        return list(dict.fromkeys((*self.with_, *hints, *self.option_tables)))

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of the plug-ins, each under the name of its table."""
        return {**self.stages, **self.option_tables}

    @property
    def opened_by(self) -> str | None:
        """The setting by which other machines can use the server without a key; None if they cannot."""
        if self.has_keys:
            return None
        if self.host in ANY or not is_here(self.host):
            return "host"
        return "trusted_proxy" if self.trusted_proxy else "allow_host" if self.allow_host else None

    def live_page(self, port: int) -> str | None:
        """Return the address of the live page that ``--live`` prints, with the key if this run has made it."""
        key = f"#key={self._key_of_run}" if self._key_of_run else ""
        return f"{self.url(port)}/live{key}" if self.live and self.operator_key else None

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

    def names_at(self, url: str) -> list[str]:
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
