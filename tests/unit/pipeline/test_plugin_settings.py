"""Settings of plug-ins: tables that the pydantic model of a plug-in validates."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from penstock.pipeline.plugin_settings import table_of
from penstock.pipeline.plugins import WrongPlugin, load
from penstock.stages.responses import recorded_responses
from tests.support.plugins import edit_of, forget_modules

CENSOR = """
from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from pydantic import BaseModel, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from penstock.pipeline.frames import ParsedFrame


class Nested(BaseModel):
    depth: int = 1


class Settings(BaseModel):
    words: list[str]
    longest: int = Field(default=9, gt=0)
    key: SecretStr = SecretStr("")
    nested: Nested = Nested()

    @model_validator(mode="after")
    def _fits(self):
        if "never" in self.words:
            raise ValueError("never is no word")
        return self


class FromVariables(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="CENSOR_")
    words: list[str] = []
    key: SecretStr


GIVEN = []


async def passed(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame


def install(pipeline, settings: Settings):
    GIVEN.append(settings)
    return pipeline.insert_after("parse", "censor", passed)


class Place:
    def install(self, pipeline, *, settings: FromVariables):
        GIVEN.append(settings)
        return pipeline


placed = Place()


def alone(pipeline):
    return pipeline.insert_after("parse", "alone", passed)


def bare(pipeline, settings):
    return pipeline


def of_dict(pipeline, settings: dict[str, str]):
    return pipeline


def misspelt(pipeline, setting: Settings):
    return pipeline


def unknown(pipeline, settings: Nowhere):
    return pipeline
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a plug-in, which is also a package with an entry point."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "censor.py").write_text(CENSOR)
    info = tmp_path / "censor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: censor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.stages]\nour-censor = censor:install\n")
    sys.path.append(str(tmp_path))
    yield tmp_path
    forget_modules(tmp_path)


def settings_given(name: str, tables: dict[str, Any]) -> Any:
    """Return the settings that a plug-in gets when it is installed."""
    edit_of(load([name], tables))(recorded_responses())
    [module] = [
        module for module in sys.modules.values() if str(getattr(module, "__file__", "")).endswith("/censor.py")
    ]
    return module.GIVEN[-1]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("censor.py:install", "censor"),
        ("./censor.py:install", "censor"),
        ("censor:install", "censor"),
        ("our-censor", "our-censor"),
    ],
)
def test_plugin_gets_the_settings_of_its_table(name: str, table: str) -> None:
    assert table_of(name) == table
    given = settings_given(name, {table: {"words": ["fish"], "longest": "3", "key": "k", "nested": {"depth": 2}}})
    assert (given.words, given.longest, given.key.get_secret_value(), given.nested.depth) == (["fish"], 3, "k", 2)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("of.us/redact.mails.py:install", "redact.mails"),
        ("my_stages.redact:install", "redact"),
        ("my_stages.redact:Place.install", "redact"),
        ("redact", "redact"),
    ],
)
def test_table_has_the_last_name_of_a_file_or_module(name: str, table: str) -> None:
    assert table_of(name) == table


def test_settings_may_have_variables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the operator comes first, and a variable has what it lacks: a key."""
    monkeypatch.setenv("CENSOR_KEY", "k")
    monkeypatch.setenv("CENSOR_WORDS", '["tree"]')
    given = settings_given("censor:placed.install", {"censor": {"words": ["fish"]}})
    assert (given.words, given.key.get_secret_value()) == (["fish"], "k")
    monkeypatch.setenv("CENSOR_WORDS", "no JSON")
    with pytest.raises(WrongPlugin, match='error parsing value for field "words" from'):
        load(["censor:placed.install"])


@pytest.mark.parametrize(
    ("name", "table", "problem"),
    [
        ("install", {}, "[stages.censor]: words: Field required"),
        ("install", {"words": "fish"}, "[stages.censor]: words: Input should be a valid list"),
        (
            "install",
            {"words": [], "wrods": []},
            "[stages.censor]: wrods: there is no such setting (did you mean words?)",
        ),
        ("install", {"words": [], "nested": {"deep": 1}}, "[stages.censor]: nested.deep: there is no such setting"),
        ("install", {"words": ["never"]}, "[stages.censor]: never is no word"),
        (
            "install",
            {"longest": 0, "words": [1]},
            "[stages.censor]: words.0: Input should be a valid string; longest: Input should be greater than 0",
        ),
        (
            "placed.install",
            {"keys": ""},
            "[stages.censor]: key: Field required; keys: there is no such setting (did you mean key?)",
        ),
        (
            "install",
            {"words": [], "port": 1},
            "[stages.censor]: port: there is no such setting; one of the server stands above all tables",
        ),
        ("misspelt", {}, "there is nothing for its parameter setting (did you mean settings?)"),
        ("alone", {}, "it takes no settings, but there is the table [stages.censor]"),
        ("bare", {}, "annotate its parameter settings with a pydantic model"),
        ("of_dict", {}, "annotate its parameter settings with a pydantic model"),
        ("unknown", {}, "it has an annotation that its module does not define: name 'Nowhere' is not defined"),
    ],
)
def test_mistake_is_reported_with_its_table_and_plugin(name: str, table: dict[str, Any], problem: str) -> None:
    with pytest.raises(WrongPlugin) as caught:
        load([f"censor.py:{name}"], {"censor": table})
    assert str(caught.value).startswith(f"--with censor.py:{name}: {problem}")


def test_plugins_of_a_file_share_its_table() -> None:
    edited = edit_of(load(["censor.py:alone", "censor.py:install"], {"censor": {"words": []}, "other": {}}))
    assert edited(recorded_responses()).names()[8:11] == ["parse", "censor", "alone"]
    with pytest.raises(WrongPlugin, match=r"^--with censor.py:install: \[stages.censor\]: words: Field required$"):
        load(["censor.py:alone", "censor.py:install"])


def test_plugins_with_settings_of_their_own_share_no_table(here: Path) -> None:
    (here / "other").mkdir()
    (here / "other" / "censor.py").write_text(CENSOR)
    names, tables = ["censor.py:install", "other/censor.py:install"], {"censor": {"words": ["fish"]}}
    with pytest.raises(WrongPlugin) as caught:
        load(names, tables)
    assert str(caught.value) == (
        "--with other/censor.py:install: --with censor.py:install reads the table [stages.censor] as well: "
        "name one of them by an entry point"
    )
    load([names[0], "our-censor"], tables | {"our-censor": {"words": ["fish"]}})
    load([names[0], names[0]], tables)


SECRET = "xyzzy"
VALUES = st.recursive(
    st.sampled_from([SECRET, f"{SECRET} never"]) | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["depth", "a"]), inner, max_size=2),
    max_leaves=5,
)


def outcome(table: dict[str, Any]) -> str:
    """Return what is shown of a plug-in with that table: its pipeline, or a traceback."""
    try:
        return repr(edit_of(load(["censor.py:install"], {"censor": table}))(recorded_responses()))
    except WrongPlugin as wrong:
        return "".join(traceback.format_exception(wrong))


@profile(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["words", "longest", "key", "nested", "other"]), VALUES))
@example({"words": ["never", SECRET]})
def test_no_value_is_shown(table: dict[str, Any]) -> None:
    """It may be a key, also one in the wrong place."""
    assert SECRET not in outcome(table)
