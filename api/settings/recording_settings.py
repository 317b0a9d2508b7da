"""The settings of the recordings of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from penstock.api.values import listed
from penstock.pipeline.recordings.format import FILES
from penstock.pipeline.recordings.sampling import ALWAYS, Condition


class RecordingSettings(BaseSettings):
    """The recordings of responses."""

    SECTION: ClassVar[str] = "Recordings"

    record: Path | None = Field(
        default=None,
        title="FOLDER",
        description="a folder that gets one recording per response",
        examples=["recordings"],
    )
    record_after: Annotated[tuple[str, ...], NoDecode, BeforeValidator(listed)] = Field(
        default=",".join(FILES),
        validate_default=True,
        title="STAGES",
        description="the stages whose output is recorded",
    )
    record_if: str | None = Field(
        default=None,
        title="CONDITION",
        description="record a fraction of responses (0.01), or those with a request header (x-record, x-record=yes)",
        examples=["0.01"],
    )
    record_texts: bool = Field(default=True, description="record texts; without them only their shape")
    record_logprobs: bool = Field(
        default=False,
        description="ask the engine for the log probability of each token of the responses that are recorded",
    )

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

    @field_validator("record_if")
    @classmethod
    def _condition(cls, value: str | None) -> str | None:
        if value is not None:
            Condition.parse(value)
        return value

    @model_validator(mode="after")
    def _has_place_of_logprobs(self) -> Self:
        if self.record_logprobs and self.record is None:
            raise ValueError("--record-logprobs needs --record")
        if self.record_logprobs and not self.record_texts:
            raise ValueError(
                "--record-logprobs: log probabilities would tell texts, so --no-record-texts leaves them out"
            )
        if self.record_logprobs and "generate" not in self.record_after:
            raise ValueError(
                "--record-logprobs needs generate in --record-after: the tokens have their log probabilities"
            )
        return self

    @property
    def recorded_if(self) -> Condition:
        """The condition under which a response is recorded."""
        return ALWAYS if self.record_if is None else Condition.parse(self.record_if)
