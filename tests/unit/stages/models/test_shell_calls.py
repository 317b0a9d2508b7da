import pytest

from penstock.stages.models.shell_calls import ArgumentsInvalid, ShellCommands, shell_action, shell_call, shown


def test_gpt_oss_call_is_read() -> None:
    text = '{"cmd": ["bash", "-lc", "ls -l"], "workdir": "/mnt/data", "env": {"A": "1"}, "timeout": 1500}'
    assert shell_call(text) == ShellCommands(
        commands=(("bash", "-lc", "ls -l"),), workdir="/mnt/data", env={"A": "1"}, timeout_ms=1500
    )


def test_api_action_is_read() -> None:
    assert shell_call('{"commands": ["ls", "pwd"], "timeout_ms": 9, "max_output_length": 10}') == ShellCommands(
        commands=(("bash", "-c", "ls"), ("bash", "-c", "pwd")), timeout_ms=9, max_output_length=10
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ls",
        "{}",
        '{"cmd": []}',
        '{"cmd": [""]}',
        '{"cmd": [1]}',
        '{"cmd": " "}',
        '{"commands": []}',
        '{"cmd": ["a\\u0000b"]}',
        '{"cmd": ["ls"], "timeout": 0}',
        '{"cmd": ["ls"], "timeout": "1"}',
        '{"cmd": ["ls"], "env": {"A=B": "1"}}',
        '{"cmd": ["ls"], "env": {"": "1"}}',
        '{"cmd": ["ls"], "workdir": "a\\u0000"}',
        '{"cmd": ' + "[" * 100_000,
        '{"commands": [' + ",".join(['"ls"'] * 65) + "]}",
    ],
)
def test_invalid_call_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ArgumentsInvalid):
        shell_call(text)
    assert shell_action(text) == {"commands": [text]}


def test_action_shows_scripts_without_their_shell() -> None:
    assert shell_action('{"cmd": ["bash", "-lc", "ls | wc"], "timeout": 20.5}') == {
        "commands": ["ls | wc"],
        "timeout_ms": 20,
    }
    assert shell_action('{"commands": ["ls", "pwd"], "max_output_length": 7}') == {
        "commands": ["ls", "pwd"],
        "max_output_length": 7,
    }
    assert shell_action('{"cmd": "ls"}') == {"commands": ["ls"]}


def test_other_programs_are_shown_as_words() -> None:
    assert shown(("grep", "-r", "two words", ".")) == "grep -r 'two words' ."
    assert shown(("bash", "script.sh")) == "bash script.sh"
