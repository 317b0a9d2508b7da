"""The life of a model with a process: starts, sleep, ends, failures, and turns with others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from penstock.extensions.models import life
from penstock.extensions.models.child import ChildSpec
from penstock.extensions.models.life import Lease, OnDemand
from penstock.pipeline.errors import ModelUnavailable, ServerStopping
from penstock.services.engines.workers import MARK as END_WITH_PARENT
from tests.support.api_clients import PATIENCE, wait_until
from tests.support.clock import Clock
from tests.support.on_demand import Scene

pytestmark = [pytest.mark.io, pytest.mark.slow]


FAILING = (("failing", "--exit-at-start 4"), ("other", ""))


async def used(model: OnDemand[str]) -> None:
    """Take a lease, and give it back."""
    (await model.acquire(None)).release()


async def post(model: OnDemand[str], path: str) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(model.url + path)


async def test_requests_share_one_start(scene: Scene) -> None:
    model = scene.model()
    assert (model.state, model.pid) == ("stopped", None)
    leases = await asyncio.gather(*(model.acquire(None) for _ in range(5)))
    assert scene.events == ["start"]
    assert scene.opened == ["open model"]
    assert {lease.value for lease in leases} == {model.url}
    assert (model.state, model.running, model.waiting) == ("ready", 5, 0)
    assert model.pid in scene.processes
    for lease in leases:
        lease.release()
        lease.release()
    assert model.running == 0
    await used(model)
    assert scene.events == ["start"]


async def test_a_model_ends_after_its_idle_time_and_starts_again(scene: Scene) -> None:
    model = scene.model(idle=0.05)
    lease = await model.acquire(None)
    await asyncio.sleep(0.2)
    assert model.state == "ready"  # it is in use
    lease.release()
    await wait_until(lambda: model.state == "stopped")
    assert scene.opened == ["open model", "leave model"]
    assert not scene.processes
    await used(model)
    assert scene.events == ["start", "start"]


@pytest.mark.parametrize(
    ("level", "wakes"),
    [
        (1, ["/wake_up"]),
        (
            2,
            [
                "/wake_up?tags=weights",
                '/collective_rpc {"method": "reload_weights"}',
                "/wake_up?tags=kv_cache",
                "/reset_prefix_cache",
            ],
        ),
    ],
)
async def test_a_model_sleeps_and_wakes(scene: Scene, level: int, wakes: list[str]) -> None:
    model = scene.model(idle=0.05, sleep=level)
    await used(model)
    await wait_until(lambda: model.state == "asleep")
    pid = model.pid
    lease = await model.acquire(None)
    assert model.pid == pid
    assert scene.events == ["start", f"/sleep?level={level}", *wakes]
    assert scene.opened == ["open model"]
    lease.release()


@pytest.mark.parametrize("fault", ["--refuse", "--die", "--hang"])
@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_a_process_that_does_not_sleep_or_wake_is_started_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fault: str, path: str
) -> None:
    monkeypatch.setattr(life, "SLEEP_TIMEOUT", 0.5 if fault == "--hang" else 60.0)
    model = scene.model(options=f"{fault} {path}", idle=0.05, sleep=1)
    await used(model)
    await wait_until(lambda: model.state in ("asleep", "stopped", "failed"))
    await used(model)
    assert scene.events.count("start") == 2


async def test_a_failed_start_is_tried_again_after_growing_pauses(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(life, "LONGEST_PAUSE", 3.0)
    model = scene.model(options="--exit-at-start 4")
    for starts, pause in enumerate((1.0, 2.0, 3.0, 3.0), 1):
        results = await asyncio.gather(*(model.acquire(None) for _ in range(3)), return_exceptions=True)
        for error in results:
            assert isinstance(error, ModelUnavailable)
            assert error.message == (
                f"The model 'model' is not available: it ended with status 4 while it started. "
                f"Try again in {pause:.0f} s."
            )
        assert model.state == "failed"
        with pytest.raises(ModelUnavailable, match="with status 4"):
            await model.acquire(None)
        assert scene.events.count("start") == starts
        await clock.move(pause)
    assert "model: There are no such weights." in caplog.messages


async def test_a_failed_start_harms_no_other_model(scene: Scene) -> None:
    failing, other = (scene.model(name, options, groups=("gpu0",)) for name, options in FAILING)
    for _ in range(2):
        failed, lease = await asyncio.gather(failing.acquire(None), other.acquire(None), return_exceptions=True)
        assert isinstance(failed, ModelUnavailable)
        assert isinstance(lease, Lease)
        lease.release()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-program --option", r"its command cannot be started \(No such file or directory\)"),
        ("/dev/null", r"its command cannot be started \(Permission denied\)"),
        ("kill -9 0", "it was killed by SIGKILL while it started"),
    ],
)
async def test_a_command_that_starts_nothing_is_named_in_one_sentence(scene: Scene, command: str, reason: str) -> None:
    with pytest.raises(ModelUnavailable, match=reason):
        await scene.model(command=f"sh -c '{command}'" if "kill" in command else command).acquire(None)


async def test_a_start_that_takes_too_long_fails(scene: Scene, tmp_path: Path) -> None:
    model = scene.model(options=f"--waits-for {tmp_path / 'ready'}", start_timeout=0.5)
    with pytest.raises(ModelUnavailable, match=r"it did not start within 0\.5 s"):
        await model.acquire(None)
    assert model.reason == "it did not start within 0.5 s"
    await wait_until(lambda: not scene.processes)


async def test_a_request_waits_for_as_long_as_it_may(scene: Scene, tmp_path: Path) -> None:
    model = scene.model(options=f"--waits-for {tmp_path / 'ready'}")
    waiting = asyncio.create_task(model.acquire(None))
    await wait_until(lambda: model.state == "starting")
    with pytest.raises(ModelUnavailable, match="it is starting"):
        await model.acquire(0.01)
    (tmp_path / "ready").touch()
    (await waiting).release()
    assert scene.events == ["start"]


async def test_requests_that_leave_lose_no_lease(scene: Scene, tmp_path: Path) -> None:
    model = scene.model(options=f"--waits-for {tmp_path / 'ready'}")
    waiting = [asyncio.create_task(model.acquire(None)) for _ in range(4)]
    await wait_until(lambda: model.state == "starting")
    waiting[0].cancel()
    (tmp_path / "ready").touch()
    while model.waiting:
        await asyncio.sleep(0)
    waiting[1].cancel()  # its lease is there, and it has not returned yet
    await asyncio.wait(waiting)
    assert model.running == sum(not each.cancelled() for each in waiting)
    for each in waiting[2:]:
        each.result().release()


async def test_a_process_that_dies_under_a_lease_is_started_again(scene: Scene) -> None:
    model = scene.model()
    lease = await model.acquire(None)
    await post(model, "/die")
    await wait_until(lambda: model.reason)
    assert model.reason == "it ended with status 3"
    assert scene.opened == ["open model"]  # the response that runs may still use it
    again = asyncio.create_task(model.acquire(None))
    lease.release()
    (await again).release()
    assert scene.events == ["start", "/die", "start"]
    assert scene.opened == ["open model", "leave model", "open model"]
    assert (model.state, model.reason, model.running) == ("ready", "", 0)


async def test_models_of_a_group_take_turns(scene: Scene) -> None:
    first, second = (
        scene.model(name, groups=("gpu0",), idle=60.0, sleep=sleep) for name, sleep in (("a", 0), ("b", 1))
    )
    lease = await first.acquire(None)
    waiting = asyncio.create_task(second.acquire(None))
    with pytest.raises(ModelUnavailable, match="other models are up in its place"):
        await second.acquire(0.01)
    lease.release()
    lease = await waiting
    assert (first.state, second.state) == ("stopped", "ready")
    waiting = asyncio.create_task(first.acquire(None))
    lease.release()
    lease = await waiting
    assert (first.state, second.state) == ("ready", "asleep")
    lease.release()


async def test_a_higher_priority_ends_a_model_under_its_lease(scene: Scene) -> None:
    low, high = scene.model("low", groups=("gpu0",), sleep=1), scene.model("high", groups=("gpu0",), priority=1)
    lease = await low.acquire(None)
    waiting = asyncio.create_task(high.acquire(None))
    await wait_until(lambda: low.state == "stopping")
    lease.release()
    (await waiting).release()
    assert (low.state, low.pid, high.state) == ("stopped", None, "ready")
    assert "/sleep?level=1" not in scene.events


async def test_a_model_that_starts_yields_to_a_higher_priority_and_then_starts_again(
    scene: Scene, tmp_path: Path
) -> None:
    low = scene.model("low", f"--waits-for {tmp_path / 'ready'}", groups=("gpu0",))
    high = scene.model("high", groups=("gpu0",), priority=1, idle=0.05)
    waiting = asyncio.create_task(low.acquire(None))
    await wait_until(lambda: low.state == "starting")
    await used(high)
    assert low.waiting == 1
    (tmp_path / "ready").touch()
    (await waiting).release()
    assert (low.state, low.reason) == ("ready", "")


async def test_close_refuses_those_that_wait(scene: Scene, tmp_path: Path) -> None:
    model = scene.model(options=f"--waits-for {tmp_path / 'ready'}")
    waiting = asyncio.create_task(model.acquire(None))
    await wait_until(lambda: model.state == "starting")
    await model.close()
    with pytest.raises(ServerStopping):
        await waiting
    with pytest.raises(ServerStopping):
        await model.acquire(None)
    assert model.state == "stopped"


async def test_a_process_that_starts_gets_no_grace(scene: Scene) -> None:
    opening = asyncio.Event()

    @asynccontextmanager
    async def opened(_: str) -> AsyncIterator[str]:
        opening.set()
        await asyncio.Event().wait()
        yield "value"

    model = scene.model(options="--ignore-sigterm", grace=3600.0, opens=opened)
    waiting = asyncio.create_task(model.acquire(None))
    await opening.wait()
    async with asyncio.timeout(PATIENCE):
        await model.close()
    with pytest.raises(ServerStopping):
        await waiting


async def test_a_model_may_be_closed_before_its_task_runs(scene: Scene) -> None:
    model = scene.model()
    await model.close()
    await scene.tasks["model"]
    with pytest.raises(ServerStopping):
        await model.acquire(None)


async def test_a_retired_model_serves_those_that_wait(scene: Scene, tmp_path: Path) -> None:
    model = scene.model(options=f"--waits-for {tmp_path / 'ready'}")
    waiting = asyncio.create_task(model.acquire(None))
    await wait_until(lambda: model.state == "starting")
    retiring = asyncio.create_task(model.retire())
    (tmp_path / "ready").touch()
    lease = await waiting
    with pytest.raises(ServerStopping):
        await model.acquire(None)
    assert not retiring.done()
    lease.release()
    await retiring
    assert model.state == "stopped"


async def test_a_changed_model_starts_once_its_former_process_has_ended(scene: Scene) -> None:
    former, changed = scene.model(options="--note-end"), scene.model(options="--note-end")
    lease = await former.acquire(None)
    retiring = asyncio.create_task(former.retire())
    waiting = asyncio.create_task(changed.acquire(None))
    for _ in range(20):  # more turns of the loop than a start needs
        await asyncio.sleep(0)
    assert (changed.waiting, changed.state) == (1, "stopped")
    lease.release()
    (await waiting).release()
    await retiring
    assert scene.events == ["start", "end", "start"]


async def test_a_model_that_cannot_be_opened_fails_and_is_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "FIRST_PAUSE", 0.0)
    faults = [ValueError("the text of a library"), None]

    @asynccontextmanager
    async def opened(_: str) -> AsyncIterator[str]:
        if fault := faults.pop(0):
            raise fault
        yield "value"

    model = scene.model(opens=opened)
    with pytest.raises(ModelUnavailable, match=r"it cannot be used \(ValueError\)"):
        await model.acquire(None)
    await wait_until(lambda: not scene.processes)
    lease = await model.acquire(None)
    assert lease.value == "value"
    lease.release()


async def test_the_log_says_why_a_model_stops(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.extensions.models.life")
    first = scene.model("first", groups=("gpu0",))
    second = scene.model("second", groups=("gpu0",), priority=1, idle=0.05)
    (await first.acquire(None)).release()
    (await second.acquire(None)).release()
    await wait_until(lambda: second.state == "stopped")
    assert "Model first yields, as its place is needed by second" in caplog.messages
    assert "Model second rests, as it was not used for 0.05 s" in caplog.messages


async def test_a_process_gets_no_variable_of_penstock(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEYS", "secret")
    monkeypatch.setenv("HF_HOME", "/models")
    model = scene.model(sleep=1)
    lease = await model.acquire(None)
    async with aiohttp.ClientSession() as session, session.get(model.url) as answer:
        variables = (await answer.json(content_type=None))["environment"]
    assert not [name for name in variables if name.startswith("PENSTOCK_")]
    assert variables["HF_HOME"] == "/models"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["VLLM_NO_USAGE_STATS"] == "1"
    assert END_WITH_PARENT in variables
    lease.release()


async def test_output_is_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock.extensions.models.child")
    model = scene.model()
    await used(model)
    assert f"model: It listens on port {model.url.rpartition(':')[2]}." in caplog.messages


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve 'a b'", ["vllm", "serve", "a b", "--host", "127.0.0.1", "--port", "8001"]),
        ("run --listen=:{port} x", ["run", "--listen=:8001", "x"]),
    ],
)
def test_the_command_gets_its_port(command: str, words: list[str]) -> None:
    assert ChildSpec(command).words(8001) == words


def test_vllm_gets_the_option_of_its_sleep_mode() -> None:
    assert ChildSpec("vllm serve m", sleep=1).words(1)[-1] == "--enable-sleep-mode"
    assert ChildSpec("vllm serve m --enable-sleep-mode", sleep=2).words(1).count("--enable-sleep-mode") == 1
    assert "--enable-sleep-mode" not in ChildSpec("vllm serve m").words(1)
