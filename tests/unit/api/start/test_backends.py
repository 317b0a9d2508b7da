from __future__ import annotations

from pathlib import Path

import pytest
from pydantic_settings import CliApp

from penstock.api.settings import Settings
from penstock.api.start.backends import stages
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.plugins import WrongPlugin


@pytest.mark.parametrize("option", ["--reasoning-parser-plugin", "--tool-parser-plugin"])
@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_plugin_that_is_missing_ends_the_start_of_a_harmony_model(option: str, form: str) -> None:
    settings = CliApp.run(Settings, cli_args=["tiny", *form.format(option, "/nowhere.py").split()])
    with pytest.raises(WrongPlugin, match=f"{option} /nowhere.py: there is no file /nowhere.py"):
        stages(settings, None)


@pytest.mark.vllm
@pytest.mark.parametrize("option", ["--reasoning-parser", "--tool-call-parser"])
def test_unknown_parser_ends_the_start_of_a_harmony_model(option: str) -> None:
    with pytest.raises(CannotStart, match=f"{option}: There is no .* parser 'bogus'"):
        stages(CliApp.run(Settings, cli_args=["tiny", option, "bogus"]), None)


@pytest.mark.vllm
def test_known_parsers_and_plugins_do_not_end_it(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.touch()
    options = ["--reasoning-parser", "qwen3", "--tool-call-parser", "none", "--reasoning-parser-plugin", str(plugin)]
    assert stages(CliApp.run(Settings, cli_args=["tiny", *options]), None).encoding == "harmony"
