"""``penstock keys``, on files and on stores."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from penstock.api.cli.keys import main
from penstock.api.http.api_key import digest_of
from penstock.api.http.auth import Keys
from penstock.pipeline.errors import CannotRun, Unauthorized
from penstock.services.standard_webhooks import Signer
from tests.support.stores import open_store

pytestmark = pytest.mark.io

ALICE = "sk-alice-0123456789"
MAKERS = 4
"""Commands that make a key at once."""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


Place = tuple[str, str]


@pytest.fixture(params=["--file", "--store"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    if request.param == "--file":
        return request.param, str(tmp_path / "keys")
    store = str(tmp_path / "folder" / "store.sqlite3")
    asyncio.run(add_to_store(store))
    return request.param, store


async def add_to_store(store: str, *digests: str) -> None:
    async with open_store(store) as opened:
        for digest in digests:
            await opened.keys.add(digest, "name=alice")


def keys_at(place: Place) -> Keys:
    """Read the keys as a server does."""
    option, where = place
    if option == "--file":
        return Keys(Path(where))

    async def read() -> Keys:
        keys = Keys(reads_store=True)
        async with open_store(where) as store:
            await keys.read_store(store.keys)
        return keys

    return asyncio.run(read())


@pytest.fixture
def keys_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``penstock keys``, and return what it prints."""

    def run(*arguments: str) -> str:
        main(arguments)
        return capsys.readouterr().out

    return run


def test_key_has_webhooks_with_a_secret_of_its_own(
    place: Place, keys_command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = []
    for name in ("alice", "bob"):
        made = keys_command("make", name, *place, "--webhook", f"https://{name}.example/hooks").strip()
        owners.append(keys_at(place).owner(f"Bearer {made}"))
    assert keys_at(place).webhook(owners[0]) == "https://alice.example/hooks"
    assert keys_at(place).webhook("unknown") == ""
    with pytest.raises(CannotRun):
        keys_command("webhook", "alice", *place)
    monkeypatch.setenv("PENSTOCK_WEBHOOK_SECRET", "one two")
    secrets = [keys_command("webhook", name, *place).strip() for name in ("alice", "bob")]
    own = [Signer.of("one two").of_owner(owner) for owner in owners]
    for secret, signer in zip(secrets, own, strict=True):
        assert Signer.of(secret).headers("a", b"b", 1) == signer.headers("a", b"b", 1)
    assert len({secret for printed in secrets for secret in printed.split()}) == 4


def test_webhook_of_a_key_is_a_url(place: Place, keys_command: Callable[..., str]) -> None:
    with pytest.raises(CannotRun, match="an invalid webhook="):
        keys_command("make", "alice", *place, "--webhook", "example.com")


def test_key_is_made_listed_and_revoked(place: Place, keys_command: Callable[..., str]) -> None:
    made = keys_command("make", "alice", *place, "--limits", "gold", "--tools", "web_search", "--expires", "9020-01-31")
    key = made.removesuffix("\n")
    other = keys_command("make", "bob", *place).strip()
    keys = keys_at(place)
    owner = keys.owner(f"Bearer {key}")
    described = keys.of(owner)
    assert described is not None
    assert (described.name, described.limits, described.tools) == ("alice", "gold", frozenset({"browser"}))
    listed = keys_command("list", *place)
    assert listed.splitlines()[0] == f"{owner[:8]} name=alice limits=gold tools=web_search expires=9020-01-31"
    assert key not in listed
    assert keys_command("revoke", "alice", *place) == ""
    assert keys_command("list", *place) == f"{keys.owner(f'Bearer {other}')[:8]} name=bob\n"
    with pytest.raises(Unauthorized):
        keys_at(place).owner(f"Bearer {key}")


def test_key_like_another_has_its_words_but_for_those_given(place: Place, keys_command: Callable[..., str]) -> None:
    words = (
        "--limits",
        "gold",
        "--tools",
        "web_search",
        "--webhook",
        "https://a.example/b?c=d",
        "--expires",
        "9020-01-31",
    )
    keys_command("make", "alice", *place, *words)
    keys_command("make", "alice-2", *place, "--like", "alice", "--tools", "none")
    kept = "limits=gold tools={} webhook=https://a.example/b?c=d expires=9020-01-31"
    listed = [line.split(" ", 1)[1] for line in keys_command("list", *place).splitlines()]
    assert listed == [f"name=alice {kept.format('web_search')}", f"name=alice-2 {kept.format('none')}"]
    with pytest.raises(CannotRun, match="there is no key bob"):
        keys_command("make", "carol", *place, "--like", "bob")


def test_expiry_may_be_a_duration(place: Place, keys_command: Callable[..., str]) -> None:
    keys_command("make", "early", *place, "--expires", "0s")
    keys_command("make", "late", *place, "--expires", "30d")
    early, late = keys_command("list", *place).splitlines()
    assert early.endswith("Z (expired)")
    assert late.endswith("Z")


MODELS = """
model-alias = ["gpt-4o=big"]
[models.big]
engine = "http://a"
names = ["opus", "claude-*"]
"""


@pytest.mark.parametrize("models", ["big", "opus,gpt-4o", "claude-haiku-4-5", "claude-*", "no-such-*", "big,x[yz]"])
def test_key_has_models_of_the_server(place: Place, keys_command: Callable[..., str], models: str) -> None:
    Path("penstock.toml").write_text(MODELS)
    made = keys_command("make", "alice", *place, "--models", models).strip()
    keys = keys_at(place)
    assert keys.models(keys.owner(f"Bearer {made}")) == frozenset(models.split(","))
    assert keys.models("unknown") is None
    assert keys_command("list", *place).endswith(f" name=alice models={models}\n")


def test_key_may_forbid_recordings(place: Place, keys_command: Callable[..., str]) -> None:
    forbids = keys_command("make", "alice", *place, "--no-record").strip()
    allows = keys_command("make", "bob", *place).strip()
    keys = keys_at(place)
    assert [keys.may_record(keys.owner(f"Bearer {key}")) for key in (forbids, allows)] == [False, True]
    assert " name=alice record=no\n" in keys_command("list", *place)


def test_key_with_an_unknown_model_is_not_made(
    place: Place, keys_command: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("penstock.toml").write_text(MODELS)
    keys_command("make", "bob", *place)
    with pytest.raises(
        CannotRun, match=r"^the key has models=bigg, and no model has that name \(did you mean big\?\)$"
    ):
        keys_command("make", "alice", *place, "--models", "opus,bigg")
    assert "alice" not in keys_command("list", *place)
    Path("penstock.toml").unlink()
    main(["make", "alice", *place, "--models", "bigg"])
    assert "it was not checked whether the server has models of these names" in capsys.readouterr().err


def test_key_is_revoked_by_its_digest_if_several_have_the_name(place: Place, keys_command: Callable[..., str]) -> None:
    keys = [ALICE, f"{ALICE}-2"]
    if place[0] == "--file":
        Path(place[1]).write_text("".join(f"{key} name=alice\n" for key in keys))
    else:
        asyncio.run(add_to_store(place[1], *map(digest_of, keys)))
    with pytest.raises(CannotRun, match=r"several keys are called alice: \w{8}, \w{8}"):
        keys_command("revoke", "alice", *place)
    digest = keys_at(place).owner(f"Bearer {keys[0]}")
    keys_command("revoke", f"sha256:{digest}", *place)
    left = keys_at(place)
    assert left.owner(f"Bearer {keys[1]}")
    assert left.of(digest) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "al ice"], "the key is not one word, or has a word after it"),
        (["make", "alice", "--tools", "3D"], "the key has an invalid tools=: '3D' is not one of"),
        (
            ["make", "alice", "--expires", "90x"],
            "expires=: expected a date such as 2027-01-31; .* such as 90d",
        ),
        (["make", "bob"], "there is a key bob already"),
        (["make", "alice", "--like", "bob", "--limits", "a b"], "not one word"),
        (["make", "alice", "--expires", ""], "the key has an invalid expires="),
        (["make", "alice", "--expires", "99999999d"], "the key has an invalid expires="),
        (["revoke", "alice"], "there is no key alice"),
        (["revoke", ""], "there is no key"),
    ],
)
def test_mistakes_change_nothing(
    place: Place, keys_command: Callable[..., str], arguments: list[str], message: str
) -> None:
    keys_command("make", "bob", *place)
    before = keys_command("list", *place)
    with pytest.raises(CannotRun, match=message):
        keys_command(*arguments, *place)
    assert keys_command("list", *place) == before


def test_commands_at_once_do_not_take_one_name(place: Place, keys_command: Callable[..., str]) -> None:
    keys_command("make", "bob", *place)
    together = Barrier(MAKERS)

    def is_made(_: int) -> bool:
        together.wait()
        try:
            main(["make", "alice", *place])
        except CannotRun:
            return False
        return True

    with ThreadPoolExecutor(MAKERS) as pool:
        made = sum(pool.map(is_made, range(MAKERS)))
    assert keys_command("list", *place).count("name=alice") == made
    assert made in ((0, 1) if place[0] == "--store" else (1,))  # of two in a store, both may give way


@pytest.mark.parametrize("is_like", [False, True], ids=["limits", "like"])
def test_limits_of_a_key_are_compared_with_those_of_the_server(
    place: Place, keys_command: Callable[..., str], capsys: pytest.CaptureFixture[str], is_like: bool
) -> None:
    first = keys_command("make", "bob", *place, "--limits", "gold") if is_like else ""
    given = ("--like", "bob") if is_like else ("--limits", "gold")
    Path("penstock.toml").write_text('limits = "limits.toml"')
    Path("limits.toml").write_text("[golden]\nresponses = 1\n")
    with pytest.raises(CannotRun, match=r"limits=gold, and --limits has no table .* \(did you mean golden\?\)"):
        keys_command("make", "alice", *place, *given)
    Path("limits.toml").write_text("[gold]\nresponses = 1\n")
    main(["make", "alice", *place, *given])
    assert "not checked" not in capsys.readouterr().err
    Path("penstock.toml").unlink()
    main(["make", "carol", *place, *given])
    assert "it was not checked whether the server has limits called gold" in capsys.readouterr().err
    assert len(keys_command("list", *place).splitlines()) == 2 + bool(first)


@pytest.mark.parametrize("command", [["make", "alice"], ["list"], ["revoke", "alice"], ["webhook", "alice"]])
def test_command_makes_no_store(tmp_path: Path, keys_command: Callable[..., str], command: list[str]) -> None:
    with pytest.raises(CannotRun, match="there is no such store"):
        keys_command(*command, "--store", str(tmp_path / "folder" / "store"))
    assert not (tmp_path / "folder").exists()


def test_rest_of_a_key_file_stays(key_file: Path, keys_command: Callable[..., str]) -> None:
    key_file.write_text(f"# ours\n\n{ALICE} tools=none # Alice")
    key_file.chmod(0o640)
    made = keys_command("make", "bob", "--file", str(key_file)).strip()
    keys = Keys(key_file)
    lines = key_file.read_text().splitlines()
    assert lines[:3] == ["# ours", "", f"{ALICE} tools=none # Alice"]
    assert lines[3:] == [f"sha256:{keys.owner(f'Bearer {made}')} name=bob"]
    keys_command("revoke", keys.owner(f"Bearer {ALICE}")[:8], "--file", str(key_file))
    assert key_file.read_text().splitlines() == ["# ours", "", *lines[3:]]
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o640
    assert [path.name for path in key_file.parent.iterdir()] == ["keys"]


def test_new_key_file_is_private(key_file: Path, keys_command: Callable[..., str]) -> None:
    keys_command("make", "bob", "--file", str(key_file))
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600


def test_missing_file_and_missing_place_are_refused(key_file: Path, keys_command: Callable[..., str]) -> None:
    with pytest.raises(CannotRun, match="No such file"):
        keys_command("list", "--file", str(key_file))
    with pytest.raises(CannotRun, match="--store none keeps no keys"):
        keys_command("list", "--store", "none")
    with pytest.raises(CannotRun, match="cannot be opened"):
        keys_command("list", "--store", "postgresql://127.0.0.1:1/none")
    with pytest.raises(SystemExit):
        keys_command("list")
