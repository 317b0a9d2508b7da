"""The tables of several models: what each mistake in them says, and the settings of each model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.cli.sample_config import sample
from penstock.api.cli.show import main as show
from penstock.api.settings import Settings
from penstock.api.settings.model_settings import SHARED, Kind, ModelTable
from penstock.pipeline.errors import CannotRun
from penstock.services.model_names import LONGEST_NAME
from tests.support.paths import ROOT

PAGE = ROOT / "docs/MANY_MODELS.md"

RIGHT = """\
[models.big]
engine = "http://a:8001"
names = ["claude-*", "gpt-4o"]
instead = "small"
summaries = "small"
engine-places = 8
reasoning_parser = "qwen3"

[models."Qwen/Qwen3-0.6B"]
model = "Qwen/Qwen3-0.6B"

[models."Qwen/Qwen3-0.6B".vllm]
max-model-len = 2048

[models.small]
command = "sh -c 'serve {port}'"
idle = "10m"
sleep = 1
groups = ["gpu0"]
tools = ["none"]

[models.vectors]
urls = ["http://b:8001", "http://c:8001"]
kind = "embed"

[model-groups]
gpu0 = 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where ``penstock.toml`` is read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, *arguments: str) -> Settings:
    Path("penstock.toml").write_text(text)
    return read_settings(arguments)


def mistake(text: str, *arguments: str) -> str:
    with pytest.raises(CannotRun) as refused:
        read(text, *arguments)
    return str(refused.value)


A = '[models.a]\nengine = "http://a:8001"\n'
B = '[models.b]\nengine = "http://b:8001"\n'
C = '[models.c]\ncommand = "sh"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # one engine each
        ("[models.a]\n", "[models.a] (penstock.toml, line 1): it needs a command, an engine, or the model for vLLM in "
                         "this process"),
        (f'{A}command = "sh"\n', "[models.a] (penstock.toml, line 1): command and engine cannot stand together: a "
                                 "model has one of them"),
        (f'{A}urls = "http://b"\n', "[models.a] (penstock.toml, line 1): engine and urls are one setting"),
        (f"{A}engine-wait = 1\nengine_wait = 2\n", "[models.a] (penstock.toml, line 1): engine_wait is set twice"),
        ('[models.a]\nmodel = "x"\n[models.b]\nmodel = "y"\n',
         "[models.b] (penstock.toml, line 3): vLLM in this process runs one model, which is [models.a] (penstock.toml, "
         "line 1)"),
        ('[models.a]\nengine = "replay:x"\n',
         "[models.a] engine (penstock.toml, line 2): replay:DIR cannot stand beside other models: start a server of "
         "its own for recordings"),
        ('[models.a]\nurls = ["ftp://a"]\n',
         "[models.a] engine (penstock.toml, line 2): ftp://a must begin with http:// or https://, and name a host, or "
         "be file.py:function"),
        (f'{A}kv-events = ["tcp://a:1", "tcp://b:1"]\n',
         "[models.a] (penstock.toml, line 1): kv-events: 2 addresses for 1 engine"),
        (f"{A}[models.a.vllm]\nseed = 1\n",
         "[models.a] (penstock.toml, line 1): vllm has no effect, as the model does not run in this process: the "
         "engine's own server has the options"),
        ('[models.a]\nmodel = "x"\nvllm = { model = "y" }\n',
         "[models.a] vllm (penstock.toml, line 3): model is a key of the table of the model, and no option here"),
        ('[models.a]\nmodel = "x"\nkind = "embed"\n',
         "[models.a] (penstock.toml, line 1): a model of the kind embed needs a server: a command, or the URL of an "
         "engine"),
        # commands
        ('[models.a]\ncommand = "no-such-program serve"\n',
         "[models.a] command (penstock.toml, line 2): there is no program no-such-program on the PATH"),
        ('[models.a]\ncommand = "/no/program"\n',
         "[models.a] command (penstock.toml, line 2): there is no program /no/program"),
        ('[models.a]\ncommand = "sh \'x"\n',
         '[models.a] command (penstock.toml, line 2): "sh \'x" is not a command as in a shell: No closing quotation'),
        ('[models.a]\ncommand = " "\n', "[models.a] command (penstock.toml, line 2): the command has no words"),
        ('[models.a]\ncommand = "sh \\u0000"\n',
         "[models.a] command (penstock.toml, line 2): the command has a character that no program gets"),
        ('[models.a]\ncommand = "CUDA_VISIBLE_DEVICES=0 vllm serve x"\n',
         "[models.a] command (penstock.toml, line 2): CUDA_VISIBLE_DEVICES=0 is no program: write env before the "
         "variables"),
        *(
            (f"{A}{key} = {value}\n",
             f"[models.a] (penstock.toml, line 1): {key} needs a command: penstock stops only what it has started")
            for key, value in (("idle", 1), ("sleep", 1), ("start-timeout", 1), ("groups", "['x']"), ("priority", 1))
        ),
        (f"{A}groups = ['x']\nidle = 1\nstart-timeout = 1\n",
         "[models.a] (penstock.toml, line 1): idle and start-timeout and groups need a command: penstock stops only "
         "what it has started"),
        (f"{C}sleep = 3\n", "[models.c] sleep (penstock.toml, line 3): Input should be 0, 1 or 2, not '3'"),
        (f'{C}idle = "soon"\n', "[models.c] idle (penstock.toml, line 3): expected a duration, such as 30d, 12h, 5m or "
                                "90s, not 'soon'"),
        (f"{C}priority = 1.5\n", "[models.c] priority (penstock.toml, line 3): Input should be a valid integer, got a "
                                 "number with a fractional part, not '1.5'"),
        # names
        (f'{A}names = ["b"]\n{B}', "[models.a] names (penstock.toml, line 3): 'b' names two models, or one twice; see "
                                   "[models.b] (penstock.toml, line 4)"),
        (f'{A}names = ["x", "x"]\n', "[models.a] names (penstock.toml, line 3): 'x' names two models, or one twice; "
                                     "see [models.a] names (penstock.toml, line 3)"),
        (f'{A}names = ["x-*"]\n{B}names = ["x-*"]\n',
         "[models.b] names (penstock.toml, line 6): 'x-*' names two models, or one twice; see [models.a] names "
         "(penstock.toml, line 3)"),
        (f'{A}names = ["x-*"]\n{B}names = ["x-1", "x-1-*"]\n',
         "[models.b] names (penstock.toml, line 6): 'x-1-*' is never meant, as 'x-*' stands before it: move it above "
         "[models.a] names (penstock.toml, line 3)"),
        (f'{A}names = [""]\n', "[models.a] names (penstock.toml, line 3): the name of a model cannot be empty"),
        (f'{A}names = ["a\\nb"]\n', "[models.a] names (penstock.toml, line 3): 'a\\nb' has characters that cannot be "
                                    "printed"),
        (f'{A}names = ["{"n" * (LONGEST_NAME + 1)}"]\n',
         "[models.a] names (penstock.toml, line 3): LONG is longer than 256 characters"),
        ('[models.""]\nengine = "http://a"\n', '[models.""] (penstock.toml, line 1): the name of a model cannot be '
                                               "empty"),
        ('[models."a*"]\nengine = "http://a"\n', '[models."a*"] (penstock.toml, line 1): the name of a table is no '
                                                 "pattern; its names may have some"),
        (f"{A}[models.a]\n", "penstock.toml: Cannot declare ('models', 'a') twice (at line 3, column 10)"),
        # other models
        (f'{A}instead = "smaller"\n[models.small]\nengine = "http://b"\n',
         "[models.a] instead (penstock.toml, line 3): there is no model 'smaller' (did you mean small?)"),
        (f'{A}summaries = "tiny"\n', "[models.a] summaries (penstock.toml, line 3): there is no model 'tiny'"),
        (f'{A}instead = "a"\n', "[models.a] instead (penstock.toml, line 3): a circle, as each model stands in for the "
                                "one before it: a, a"),
        (f'{A}instead = "b"\n{B}instead = "c"\n{C}instead = "b"\n',
         "[models.b] instead (penstock.toml, line 6): a circle, as each model stands in for the one before it: b, c, "
         "b"),
        (f'{A}instead = "b"\n{B}kind = "embed"\n',
         "[models.a] instead (penstock.toml, line 3): b is of another kind, embed"),
        (f'{A}summaries = "b"\n{B}kind = "embed"\n',
         "[models.a] summaries (penstock.toml, line 3): b does not generate, as its kind is embed"),
        (f'{A}kind = "embed"\n',
         "[models.a] kind (penstock.toml, line 3): no model generates, and a server needs one that does"),
        # groups
        (f'{C}groups = ["gpu0"]\n[model-groups]\ngpu1 = 1\n',
         "[model-groups] gpu1 (penstock.toml, line 5): no model is in a group of that name (did you mean gpu0?)"),
        (f'{C}groups = ["gpu0"]\n[model-groups]\ngpu0 = 0\n',
         "[model-groups] gpu0 (penstock.toml, line 5): expected the number of models that may be up at once, not 0"),
        (f'{C}groups = ["g", "g"]\n', "[models.c] groups (penstock.toml, line 3): g stands there twice"),
        # keys
        (f'{A}enginee-wait = "1s"\n', "[models.a] enginee-wait (penstock.toml, line 3): there is no such setting (did "
                                      "you mean engine-wait?)"),
        (f"{A}port = 8001\n", "[models.a] port (penstock.toml, line 3): it is a setting of the server: move it above "
                              "all tables of penstock.toml"),
        (f'{A}kind = "talk"\n', "[models.a] kind (penstock.toml, line 3): Input should be 'generate', 'embed', "
                                "'score', 'rerank', 'classify', 'pool', 'audio', 'image' or 'any', not 'talk'"),
        (f'{A}tools = ["hammer"]\n', "[models.a] tools (penstock.toml, line 3): 'hammer' is not one of TOOLS and none"),
        *(
            (f"{A.replace('models', 'model')}{more}",
             "model (penstock.toml, line 1): it is the name of one model: a table of several is [models.a]")
            for more in ("", "[model.b]\n", B)
        ),
        ("models = 3\n", "models: expected a table for each model, such as [models.big]"),
        ('[models]\nengine = "http://a"\n', "[models.engine] (penstock.toml, line 2): a model is a table, such as "
                                            "[models.big]"),
    ],
)  # fmt: skip
def test_mistake_names_its_table_key_and_line(text: str, message: str) -> None:
    said = mistake(text)
    if "LONG" in message:
        message = message.replace("LONG", said.split(": ")[1].split(" is longer")[0])
    if "TOOLS" in message:
        said = said.replace(said.split("one of ")[1].split(" and none")[0], "TOOLS")
    assert said == message


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "table", "home"),
    [
        ("a", A, "the engine's own server"),
        ("a", A.replace("engine", "urls"), "the engine's own server"),
        ("c", C, "its command"),
        ("d", "[models.d]\nmodel = 'x'\n", "the model's table vllm"),
    ],
)
def test_option_of_vllm_in_a_table_has_a_home(name: str, table: str, home: str) -> None:
    place = f"[models.{name}] max-model-len (penstock.toml, line 3)"
    assert mistake(f"{table}max_model_len = 1\n") == f"{place}: it is an option of vLLM's engine: move it into {home}"


@pytest.mark.parametrize(
    ("arguments", "before", "message"),
    [
        (("tiny",), "", "MODEL: the tables of models name all models: write it into a table of its own"),
        (("--engine", "http://b"), "", "--engine: the tables of models name all models: write it into a table of its "
                                       "own"),
        ((), 'engine = "http://b"\n', "engine (penstock.toml, line 1): the tables of models name all models: write it "
                                      "into a table of its own"),
        (("--frontends", "2"), "", "--frontends: several models need one process"),
        (("--max-model-len=9",), "", "--max-model-len=9: no model runs in this process: write it into its command"),
        (("--model-config", "m.toml"), "", "--model-config: models stand in [models.a] (penstock.toml, line 1) as "
                                           "well: keep one of both"),
    ],
)  # fmt: skip
def test_nothing_of_one_model_stands_beside_several(arguments: tuple[str, ...], before: str, message: str) -> None:
    Path("m.toml").write_text(A.replace("models.", ""))
    assert mistake(before + A, *arguments) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "m.toml: No such file or directory"),
        ("[a\n", "m.toml: Expected ']' at the end of a table declaration (at line 1, column 3)"),
        ("", "--model-config: m.toml has no model: begin a table for each, such as [big]"),
        ("[a]\n", "[a] (m.toml, line 1): it needs a command, an engine, or the model for vLLM in this process"),
        ('[a]\ncommand = "sh"\n\n[a.vllm]\nseed = 1\n',
         "[a] (m.toml, line 1): vllm has no effect, as the model does not run in this process: its command has the "
         "options"),
        ('["x/y.z"]\ncommand = "sh"\ninstead = "b"\n', '["x/y.z"] instead (m.toml, line 3): there is no model \'b\''),
    ],
)  # fmt: skip
def test_mistake_of_a_file_of_models_names_its_line(text: str | None, message: str) -> None:
    if text is not None:
        Path("m.toml").write_text(text)
    assert mistake("", "--model-config", "m.toml") == message


def test_each_mistake_has_a_line() -> None:
    lines = mistake(f'{A}instead = "x"\n{B}summaries = "y"\n').splitlines()
    assert [line.split(" (")[0] for line in lines] == ["[models.a] instead", "[models.b] summaries"]


def test_variable_has_models_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", '{"a": {"urls": "http://a:1"}}')
    assert read("").models["a"].engine == ["http://a:1"]
    monkeypatch.setenv("PENSTOCK_MODELS", '{"a": {"url": "http://a:1"}}')
    assert mistake("") == "[models.a] url (PENSTOCK_MODELS): there is no such setting (did you mean urls?)"


def test_file_with_the_key_of_an_engine_is_to_be_read_by_its_owner_alone(capsys: pytest.CaptureFixture[str]) -> None:
    warning = "penstock: {0} holds keys, and other users of this machine can read it; chmod 600 {0} prevents that\n"
    text = f'{A}engine-key = "hunter2"\n'
    for name, settings, arguments in (("penstock.toml", text, ()), ("m.toml", "", ("--model-config", "m.toml"))):
        file = Path(name)
        file.write_text(text.replace("models.", "") if arguments else text)
        for mode, shown in ((0o644, warning.format(name)), (0o600, "")):
            file.chmod(mode)
            read(settings, *arguments)
            assert capsys.readouterr().err == shown


def test_no_mistake_shows_a_key() -> None:
    assert "hunter2" not in mistake(f'{A}engine-key = ["hunter2"]\n')


@pytest.mark.parametrize("in_a_file_of_its_own", [False, True])
def test_settings_of_a_model_are_those_of_a_server_of_it_alone(in_a_file_of_its_own: bool) -> None:
    outside, arguments, text = 'engine-wait = "7s"\ntool-call-parser = "hermes"\n', list[str](), RIGHT
    if in_a_file_of_its_own:
        tables, _, groups = RIGHT.partition("[model-groups]")
        Path("m.toml").write_text(tables.replace("[models.", "["))
        arguments, text = ["--model-config", "m.toml"], f"[model-groups]{groups}"
    settings = read(outside + text, *arguments)
    assert list(settings.models) == ["big", "Qwen/Qwen3-0.6B", "small", "vectors"]
    assert settings.model_groups == {"gpu0": 2}
    big, here, small, vectors = map(settings.of_model, settings.models)
    assert not big.models
    assert (big.engine, big.engine_places, big.engine_wait) == (["http://a:8001"], 8, 7.0)
    assert (big.reasoning_parser, big.tool_call_parser) == ("qwen3", "hermes")
    assert (here.engine, here.model, here.vllm) == ([], "Qwen/Qwen3-0.6B", {"max-model-len": 2048})
    assert (small.engine, small.model, small.reasoning_parser, small.engine_wait) == ([], None, None, 7.0)
    assert vectors.engine == ["http://b:8001", "http://c:8001"]
    assert settings.in_this_process == here
    table = settings.models["small"]
    assert (table.idle, table.sleep, table.start_timeout, table.groups) == (600.0, 1, 600.0, ["gpu0"])


def test_model_of_any_kind_stands_in_for_all() -> None:
    text = f'{A}instead = "b"\nsummaries = "b"\n{B}kind = "any"\n{C}kind = "embed"\ninstead = "b"\n'
    kinds = {name: (table.kind, table.generates) for name, table in read(text).models.items()}
    assert kinds == {"a": ("generate", True), "b": ("any", True), "c": ("embed", False)}


@pytest.mark.parametrize("in_a_file_of_its_own", [False, True])
def test_show_lists_the_models(capsys: pytest.CaptureFixture[str], in_a_file_of_its_own: bool) -> None:
    show([])
    pipeline = capsys.readouterr().out
    tables, _, groups = RIGHT.partition("[model-groups]")
    text = RIGHT
    if in_a_file_of_its_own:
        Path("m.toml").write_text(tables.replace("[models.", "["))
        text = f'model-config = "m.toml"\n[model-groups]{groups}'
    Path("penstock.toml").write_text(text)
    show([])
    assert capsys.readouterr().out == (
        f"{pipeline}\nbig: at http://a:8001; also claude-*, gpt-4o; instead small; summaries small\n"
        "Qwen/Qwen3-0.6B: Qwen/Qwen3-0.6B on vLLM in this process\n"
        "small: started by sh -c 'serve {port}'; groups gpu0; idle 600 s\n"
        "vectors: embed, passed on, at http://b:8001 and http://c:8001\n"
    )


def test_show_names_a_mistake_in_the_models() -> None:
    Path("penstock.toml").write_text("[models.a]\n")
    with pytest.raises(CannotRun, match=r"^\[models.a\] \(penstock.toml, line 1\): it needs a command, an engine, or"):
        show([])


def test_options_of_vllm_are_for_the_model_in_this_process() -> None:
    settings = read(f'{A}[models.b]\nmodel = "x"\n[vllm]\nseed = 1\n', "--max-model-len=9")
    assert settings.of_model("b").engine_options == ["--seed=1", "--max-model-len=9"]
    assert settings.of_model("a").engine_options == []
    assert not {"vllm", "engine_arguments"} & settings.of_model("a").model_fields_set


@pytest.mark.parametrize(
    ("first", "second"), [("x-1-*", "x-*"), ("x-?", "x-*"), ("x-[!*]*", "x-*"), ("*a*", "[ab]*"), ("x-*", "x-1")]
)
def test_pattern_that_some_name_can_mean_is_kept(first: str, second: str) -> None:
    models = read(f'{A}names = ["{first}"]\n{B}names = ["{second}"]\n').models
    assert [table.names for table in models.values()] == [[first], [second]]


def test_patterns_of_one_model_or_of_two_kinds_may_overlap() -> None:
    text = f'{A}names = ["x-*", "x-1-*"]\n{B}kind = "embed"\nnames = ["x-e-*"]\n'
    assert list(read(text).models) == ["a", "b"]


def test_options_of_vllm_without_a_model_in_this_process_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    here = '[models.b]\nmodel = "x"\n'
    for more, said in ((here, ""), ("", "penstock: vllm (penstock.toml, line 3): the table has no effect, as vLLM in "
                                        "this process runs no model\n")):  # fmt: skip
        read(f"{A}[vllm]\nseed = 1\n{more}")
        assert capsys.readouterr().err == said


def test_one_model_needs_no_table() -> None:
    settings = read("", "--engine", "http://a")
    assert (settings.models, settings.in_this_process) == ({}, None)
    alone = read("", "tiny")
    assert alone.in_this_process is alone


def test_the_models_of_the_sample_file_are_valid() -> None:
    lines = re.findall(r"^#     (.*)$", sample(), re.MULTILINE)
    settings = read("\n".join(lines).replace("vllm serve", "sh"))
    assert list(settings.models) == ["big", "small"]
    assert {key for table in settings.models.values() for key in table.model_fields_set} == {
        name for name in ModelTable.model_fields if name not in SHARED
    } | {"engine"}


def test_each_key_of_a_table_has_a_description() -> None:
    hidden = {"engine_key", "shadow_key", "vllm"}
    assert [
        name for name, field in ModelTable.model_fields.items() if not field.description and name not in hidden
    ] == []


def test_the_page_has_each_key_that_only_a_table_has_and_each_kind() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows.keys() == {name.replace("_", "-") for name in ModelTable.model_fields if name not in SHARED}
    assert re.findall(r"`(\w+)`", rows["kind"]) == [*get_args(Kind)]
