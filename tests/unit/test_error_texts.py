"""Texts of other libraries' errors stay inside: a client, a log or a store gets words of penstock's own.

An error of a library may repeat what the library was given.  So each place that catches one, or takes one as an
argument, writes `penstock.pipeline.foreign_errors.named_error` or words of its own.  `ALLOWED` lists the places that
may write its text.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import PRODUCT, ROOT

OPERATOR = "the start, or a command, says what is wrong with an option, a file, a stage or a model of the operator"
SENT = "a decoder or a check says what is wrong in what the client, or the model, has written itself"
OWN = "an own error, or a text that is compared and never written"
VLLM = "vLLM, or the template of the model, wrote it for the client; neither is given a secret"
SANDBOX = "a process in a sandbox, which has no secrets, tells the model"

ALLOWED = {
    "api/http/api_key.py _fields": OPERATOR,
    "api/start/backends.py _prefix_caches": OPERATOR,
    "api/cli/check.py all_pass": OPERATOR,
    "api/cli/drawn.py _known_of": OPERATOR,
    "api/cli/command_line.py parsed_settings": OPERATOR,
    "extensions/workbench/conformance/check.py fits": OPERATOR,
    "extensions/workbench/conformance/client.py _read": OPERATOR,
    "extensions/workbench/conformance/client.py as_object": OPERATOR,
    "extensions/workbench/conformance/command.py main": OPERATOR,
    "extensions/workbench/conformance/responses.py check_json_object": OPERATOR,
    "extensions/workbench/conformance/responses_streams.py responses_stream_rules": OPERATOR,
    "extensions/workbench/conformance/run.py _verdict": OPERATOR,
    "extensions/workbench/conformance/sdks.py _client": OPERATOR,
    "extensions/workbench/conformance/sdks.py sdk_answer": OPERATOR,
    "api/cli/keys.py _make": OPERATOR,
    "api/cli/keys.py main": OPERATOR,
    "extensions/accounts/command.py main": OPERATOR,
    "extensions/batches/anthropic_form.py _read": SENT,
    "extensions/batches/line_files.py _line": SENT,
    "api/cli/mistakes.py explained": OPERATOR,
    "api/cli/mistakes.py mistakes": OPERATOR,
    "extensions/rollouts/command.py main": OPERATOR,
    "extensions/rollouts/reading.py _prompts": OPERATOR,
    "extensions/rollouts/reading.py _readable": OPERATOR,
    "services/engines/vllm.py _changes": OPERATOR,
    "extensions/workbench/record.py _condition": OPERATOR,
    "extensions/workbench/record.py main": OPERATOR,
    "api/cli/recorded_model.py model_of": OPERATOR,
    "api/cli/replayer.py part": OPERATOR,
    "api/cli/serve.py main": OPERATOR,
    "api/cli/stage_log.py described": OPERATOR,
    "extensions/workbench/timeline/timeline.py _failures": OPERATOR,
    "api/frontends/frontend.py run_frontend": OPERATOR,
    "api/http/key_sources.py _usable": OPERATOR,
    "testing/dialects.py _check_idle": OPERATOR,
    "testing/dialects.py _check_wrong_bodies": OPERATOR,
    "testing/hosts.py run": OPERATOR,
    "testing/rules.py checking": OPERATOR,
    "api/toml_file.py read_toml": OPERATOR,
    "extensions/sign_in/issuers.py check_grants": OPERATOR,
    "api/start/loading.py __exit__": OPERATOR,
    "api/settings/model_settings.py check_tools": OPERATOR,
    "api/settings/model_settings.py checked": OPERATOR,
    "api/settings/model_settings.py of_files": OPERATOR,
    "api/settings/model_settings.py with_models_of_files": OPERATOR,
    "api/settings/model_settings.py wrong_command": OPERATOR,
    "api/settings/sources.py read_toml": OPERATOR,
    "api/settings/stage_settings.py stage_tables": OPERATOR,
    "api/values.py decoded": OPERATOR,
    "extensions/workbench/wiretap/sending.py read_exchange": OPERATOR,
    "pipeline/field_types.py _check_struct": OPERATOR,
    "pipeline/field_types.py check_fields": OPERATOR,
    "pipeline/junction.py _ends": OPERATOR,
    "pipeline/members.py _wrong_method": OPERATOR,
    "pipeline/members.py _wrong_value": OPERATOR,
    "pipeline/plugin_settings.py model_of": OPERATOR,
    "pipeline/plugin_settings.py validated": OPERATOR,
    "pipeline/plugins.py described": OPERATOR,
    "pipeline/recordings/format.py _read_frame": OPERATOR,
    "pipeline/recordings/recorder.py tapped": OPERATOR,
    "stages/models/chat/load.py load_chat_model": OPERATOR,
    "stages/models/chat/parsers.py composed": OPERATOR,
    "stages/models/chat/standalone.py _read": OPERATOR,
    "stages/models/chat/standalone.py _source": OPERATOR,
    "stages/models/chat/standalone.py tokenizer": OPERATOR,
    "services/engines/vllm.py warm_up": OPERATOR,
    "services/engines/load_errors.py _message": OPERATOR,
    "services/mcp_config.py _server": OPERATOR,
    "services/mcp_config.py read_servers": OPERATOR,
    "services/prompts.py _parameters": OPERATOR,
    "services/web/ssrf.py _network": OPERATOR,
    "extensions/tools/resources/vector_stores.py _known_cursor": SENT,
    "extensions/sign_in/claims.py signed_key": SENT,
    "api/socket/events.py read_event": SENT,
    "pipeline/protocol/params/json_body.py read_json": SENT,
    "pipeline/protocol/params/refusal.py refusal_of": SENT,
    "pipeline/protocol/params/structs.py _refusal": SENT,
    "stages/models/client_actions.py _computer_actions": SENT,
    "stages/models/client_actions.py _patch": SENT,
    "stages/models/client_actions.py _search": SENT,
    "stages/models/shell_calls.py shell_call": SENT,
    "stages/render/constraint.py as_lark": SENT,
    "extensions/programs/arguments.py parsed": SENT,
    "extensions/tools/mcp/mcp_servers.py arguments": SENT,
    "services/tool_search.py run": SENT,
    "api/http/auth.py take": OWN,
    "extensions/sign_in/discovery.py _discovered": OWN,
    "pipeline/foreign_errors.py named_error": OWN,
    "pipeline/foreign_errors.py text_of": OWN,
    "pipeline/lifecycle/outcome.py failed_response": OWN,
    "pipeline/recordings/format.py of": OWN,
    "extensions/tools/files/office.py _pieces": OWN,
    "stages/models/chat/template.py refusal": VLLM,
    "services/engines/vllm.py _placing": VLLM,
    "services/engines/vllm.py _refusals": VLLM,
    "extensions/tools/sandbox/shell.py become": SANDBOX,
}
"""Reasons by ``file function``."""

WRITERS = frozenset({"str", "repr", "format", "print", "ascii", "vars"})
LOGGING = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
TEXTS = frozenset({"args", "message", "msg", "reason", "errors", "filename", "doc", "object", "detail"})
CAUSES = frozenset({"__cause__", "__context__"})
HARMLESS = frozenset({"type", "named_error", "text_of", "isinstance", "getattr"})


def is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


class Places(ast.NodeVisitor):
    """Finds where a module writes the text of an error that is not penstock's."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.found: dict[str, list[int]] = {}
        self._names = {**vars(builtins), **names}
        self._foreign: list[str] = []
        self._functions = [""]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        foreign = [each.arg for each in given if each.annotation and self._may_be_foreign(each.annotation)]
        self._functions.append(node.name)
        self._within(node, foreign)
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast calls

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        is_foreign = node.name and node.type and not self._is_own(node.type)
        self._within(node, [node.name] if node.name and is_foreign else [])

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        self._check(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Mod):
            self._check(node.right)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        is_writer = isinstance(called, ast.Name) and called.id in WRITERS
        is_log = isinstance(called, ast.Attribute) and called.attr in LOGGING and "log" in ast.unparse(called.value)
        if is_writer or is_log or (isinstance(called, ast.Attribute) and called.attr == "format"):
            for argument in node.args:
                self._check(argument)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in TEXTS and isinstance(node.value, ast.Name) and node.value.id in self._foreign:
            self._note(node)
        self.generic_visit(node)

    def _within(self, node: ast.AST, foreign: list[str]) -> None:
        self._foreign += foreign
        self.generic_visit(node)
        del self._foreign[len(self._foreign) - len(foreign) :]

    def _check(self, written: ast.AST) -> None:
        """Note the foreign errors in an expression that is written; `visit_Attribute` judges their attributes."""
        match written:
            case ast.Call(func=ast.Name(id=name)) if name in HARMLESS:
                return
            case ast.Name(id=name) if name in self._foreign:
                self._note(written)
            case ast.Attribute(attr=name) if name in CAUSES:
                self._note(written)
            case ast.Attribute():
                self.visit(written)
            case _:
                if isinstance(written, ast.Call):
                    self.visit_Call(written)
                for part in ast.iter_child_nodes(written):
                    self._check(part)

    def _note(self, node: Any) -> None:
        self.found.setdefault(self._functions[-1], []).append(node.lineno)

    def _is_own(self, caught: ast.expr) -> bool:
        kinds = self._value(ast.unparse(caught))
        flat = kinds if isinstance(kinds, tuple) else (kinds,)
        return all(is_error(each) and each.__module__.startswith("penstock.") for each in flat)

    def _may_be_foreign(self, annotation: ast.expr) -> bool:
        kinds = [self._value(name) for name in re.findall(r"[\w.]+", ast.unparse(annotation))]
        return any(is_error(each) and not each.__module__.startswith("penstock.") for each in kinds)

    def _value(self, expression: str) -> Any:
        """Return what an expression is in the module; a class that a function imports is foreign."""
        try:
            return eval(expression, self._names)
        except (NameError, AttributeError):
            return None


def modules() -> Iterator[Path]:
    for folder in PRODUCT:
        yield from sorted((ROOT / folder).rglob("*.py"))
    yield ROOT / "server.py"


def places_of(path: Path) -> dict[str, list[int]]:
    name = ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    places = Places(vars(importlib.import_module(name)))
    places.visit(ast.parse(path.read_text()))
    return places.found


@cache
def found() -> dict[str, list[int]]:
    return {
        f"{path.relative_to(ROOT)} {function}": lines
        for path in modules()
        for function, lines in places_of(path).items()
    }


@pytest.mark.slow
@pytest.mark.vllm
def test_no_place_writes_the_text_of_a_foreign_error() -> None:
    assert {place: lines for place, lines in found().items() if place not in ALLOWED} == {}


@pytest.mark.slow
@pytest.mark.vllm
def test_each_allowed_place_exists() -> None:
    assert ALLOWED.keys() - found().keys() == set()


@pytest.mark.parametrize(
    "written",
    [
        "str(e)",
        "repr(e)",
        "f'{e}'",
        "f'{e!r}'",
        "'%s' % e",
        "'%s' % (1, e)",
        "'{}'.format(e)",
        "e.args",
        "e.message",
        "logger.info('%s', e)",
        "logger.warning('%r', e.__cause__)",
        "f'{shown(str(e))}'",
        "str(e or 1)",
        "print(e)",
    ],
)
def test_writing_is_found(written: str) -> None:
    for code in (f"try: pass\nexcept ValueError as e: x = {written}", f"def f(e: Exception | None): return {written}"):
        places = Places({})
        places.visit(ast.parse(code))
        assert places.found


@pytest.mark.parametrize(
    "harmless", ["named_error(e)", "f'{type(e).__name__}'", "logger.info('%s', named_error(e))", "f'{e.errno}'"]
)
def test_naming_is_not_found(harmless: str) -> None:
    places = Places({})
    places.visit(ast.parse(f"try: pass\nexcept ValueError as e: x = {harmless}"))
    assert not places.found
