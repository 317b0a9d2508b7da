"""The settings of stages of the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliSuppress, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.api.settings.sources import FILE, PREFIX, read_file, variable
from penstock.api.values import Tables, Texts
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import nearest
from penstock.pipeline.plugin_settings import table_of


class StageSettings(BaseSettings):
    """The stages of the operator."""

    SECTION: ClassVar[str] = "Stages"

    with_: Texts = Field(
        default=[],
        alias="with",
        title="STAGE",
        description="a stage of your own: file.py:function, module:function or the name of an entry point; repeatable",
        examples=["shout.py:install"],
    )
    print_pipeline: bool = Field(default=False, description="draw the pipeline of the model, and exit")


class StageTables(BaseSettings):
    """The settings of the stages of the operator, which have no option, as they may have secrets."""

    SECTION: ClassVar[str] = "Stages"

    stages: CliSuppress[Tables] = Field(default={}, repr=False)

    @field_validator("stages")
    @classmethod
    def _has_stages(cls, tables: Tables, info: ValidationInfo) -> Tables:
        named = [table_of(name) for name in info.data.get("with_", ())]
        for table, settings in tables.items():
            if "with_" in info.data and table not in named:
                raise ValueError(_unread(table, settings, named))
        return tables


def _unread(table: str, settings: Mapping[str, Any], named: Sequence[str]) -> str:
    """Return the reason why no stage reads a table."""
    if not named and "with" in settings:
        return f"with stands in the table [stages.{table}]: move it above all tables"
    there_are = nearest(table, named) or (f": those are {', '.join(named)}" if named else ", as there is none")
    return f"no --with has the name {table}{there_are}"


class _TablesAlone(StageTables):
    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Prefer the environment to the file, whose keys are the arguments."""
        return env_settings, init_settings


def stage_tables() -> Tables:
    """Return the tables of stages for a command that has no settings; raises `CannotRun`."""
    in_file = read_file(FILE, ["stages"])
    try:
        return _TablesAlone(**in_file).stages
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        place = FILE if "stages" in in_file else variable("stages")
        raise CannotRun(f"{'.'.join(map(str, problem['loc']))} ({place}): {problem['msg']}") from None
