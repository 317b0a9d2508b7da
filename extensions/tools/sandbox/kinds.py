"""Python and the shell of a sandbox as kinds of tools: what the stages know of them.

The words about a sandbox hold for one sandbox only, so that the host of each names its own folder, time and network.
"""

from __future__ import annotations

from collections.abc import Collection

from openai_harmony import ToolNamespaceConfig

from penstock.pipeline.frames import CallData, CodeCallOpened, CodeOutputs, ShellCallOpened, ShellOutput
from penstock.pipeline.hosted_kinds import ByMcp, HostedKind, refuse_bound
from penstock.pipeline.protocol.items import CodeInterpreterCall, ShellCall
from penstock.pipeline.protocol.params.request import OUTPUTS
from penstock.pipeline.protocol.params.tools import (
    CodeInterpreterToolParam,
    ContainerReference,
    OwnContainer,
    ShellToolParam,
    ToolParam,
)
from penstock.pipeline.protocol.tools import FunctionTool
from penstock.services.container_wishes import ContainerWish
from penstock.stages.models.shell_calls import shell_action

_TRAINED = ToolNamespaceConfig.python().description or ""
_TIME = "after 120.0 seconds"
_DRIVE = "The drive at '/mnt/data' can be used to save and persist user files."
_NETWORK = "Internet access for this session is UNKNOWN. Depends on the cluster."
_NO_NETWORK = "Internet access for this session is disabled."
_WORKING_FOLDER = "The working folder can be used to save and persist user files: open them by their names alone."
_COMMANDS = "Tool for running commands in a sandbox.\nWhat one command leaves in its files is there for the next."
_EXEC = FunctionTool(
    "exec",
    "Runs the program `cmd[0]` with the rest of `cmd` as its arguments, and returns what it writes.\n"
    "`env` adds to its environment, and `timeout` is in milliseconds.",
    {
        "type": "object",
        "properties": {
            "cmd": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "env": {"type": ["object"]},
            "timeout": {"type": "number"},
        },
        "required": ["cmd"],
    },
)


def python_description(seconds: float, *, has_drive: bool) -> str:
    """Return the training's description of Python, with the facts of a sandbox without network.

    A call may take ``seconds``.  If there is no drive, only the working folder leads to the files.
    """
    text = _TRAINED.replace(_TIME, f"after {float(seconds)} seconds").replace(_NETWORK, _NO_NETWORK)
    return text if has_drive else text.replace(_DRIVE, _WORKING_FOLDER)


def container_description(seconds: float, *, has_drive: bool) -> str:
    """Return the description of the shell, with the facts of a sandbox without network, as for Python."""
    drive = _DRIVE if has_drive else _WORKING_FOLDER
    return f"{_COMMANDS}\nThe commands of a call end after {seconds:g} seconds. {drive} {_NO_NETWORK}"


def _read_code(tool: ToolParam, path: str, *, by_mcp: bool) -> ContainerWish | None:
    if not isinstance(tool, CodeInterpreterToolParam):
        return None
    if isinstance(tool.container, str):
        return _wish("python", ContainerWish(id=tool.container, path=f"{path}.container"), path, by_mcp=by_mcp)
    return _own("python", tool.container, path, "container", by_mcp=by_mcp)


def _read_shell(tool: ToolParam, path: str, *, by_mcp: bool) -> ContainerWish | None:
    match tool:
        case ShellToolParam(environment=ContainerReference(container_id=name)):
            wish = ContainerWish(id=name, path=f"{path}.environment.container_id")
            return _wish("container", wish, path, by_mcp=by_mcp)
        case ShellToolParam(environment=OwnContainer() as own):
            return _own("container", own, path, "environment", by_mcp=by_mcp)
        case _:
            return None


def _own(namespace: str, own: OwnContainer | None, path: str, key: str, *, by_mcp: bool) -> ContainerWish | None:
    """Return the wish for a container that the server chooses."""
    own = own or OwnContainer()
    bound = next((name for name in ("network_policy", "memory_limit", "file_ids") if getattr(own, name)), None)
    if by_mcp and bound:
        refuse_bound(namespace, path, f"{key}.{bound}")
    wish = ContainerWish(memory_limit=own.memory_limit, file_ids=tuple(own.file_ids or ()), path=f"{path}.{key}")
    return None if by_mcp else wish


def _wish(namespace: str, wish: ContainerWish, path: str, *, by_mcp: bool) -> ContainerWish:
    """Return the wish for a container that the request names, unless an MCP server runs the tool."""
    if by_mcp:
        refuse_bound(namespace, path, wish.path.removeprefix(f"{path}."))
    return wish


def _code_called(name: str, text: str, suffix: str) -> CodeInterpreterCall:
    return CodeInterpreterCall(CodeInterpreterCall.new_id(suffix), text, "", "incomplete")


def _code_shown(data: CallData, include: Collection[str]) -> CallData | None:
    """Return the outputs only if the request includes them."""
    return None if isinstance(data, CodeOutputs) and OUTPUTS not in include else data


def _code_outputs(result: str, error: str | None) -> CodeOutputs | None:
    logs = error or result
    return CodeOutputs(({"type": "logs", "logs": logs},)) if logs else None


def _shell_called(name: str, text: str, suffix: str) -> ShellCall:
    return ShellCall(
        ShellCall.new_id(suffix),
        call_id=f"call_{suffix}",
        action=shell_action(text),
        status="incomplete",
        environment={"type": "container_reference"},
    )


def _shell_output(result: str, error: str | None) -> ShellOutput:
    ended = {"type": "exit", "exit_code": 0 if error is None else 1}
    return ShellOutput(({"stdout": result, "stderr": error or "", "outcome": ended},))


PYTHON = HostedKind(
    namespace="python",
    api_type="code_interpreter",
    description=_TRAINED,
    functions=(FunctionTool("python", "Python code to run."),),
    opened=lambda _: CodeCallOpened(),
    called=_code_called,
    labels=("python", "code_interpreter"),
    label_of_vllm="code_interpreter",
    read=_read_code,
    option="--sandbox",
    shown=_code_shown,
    by_mcp=ByMcp(data=_code_outputs),
)

CONTAINER = HostedKind(
    namespace="container",
    api_type="shell",
    description=_COMMANDS,
    functions=(_EXEC,),
    opened=lambda _: ShellCallOpened(),
    called=_shell_called,
    labels=("container", "shell"),
    label_of_vllm="container",
    read=_read_shell,
    option="--sandbox",
    by_mcp=ByMcp(data=_shell_output),
)
