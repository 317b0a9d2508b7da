"""The link between the supervisor and a frontend: order, whole messages, and connections that still work."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.frontends.link import (
    IDS,
    Abort,
    Draining,
    EngineLost,
    FrontendLost,
    LastConnectionSent,
    Link,
    Received,
    RequestBegun,
    RequestEnded,
    Serving,
    Stop,
    new_link,
)

FROM_FRONTEND = st.one_of(
    st.builds(RequestBegun, st.text(max_size=50)),
    st.builds(RequestEnded, st.text(max_size=50)),
    st.builds(Received, st.integers(0, 2**40)),
    st.just(Draining()),
    st.builds(
        Serving, st.tuples(st.text()), st.none(), st.lists(st.tuples(st.binary(max_size=4), st.binary())).map(tuple)
    ),
)
FROM_SUPERVISOR = st.one_of(
    st.sampled_from([LastConnectionSent(), EngineLost(), Stop()]),
    st.builds(FrontendLost, st.text()),
    st.builds(Abort, st.tuples(st.text())),
)


def links() -> tuple[Link, Link]:
    ours, theirs = new_link()
    return ours, Link(theirs)


@given(st.lists(FROM_FRONTEND, max_size=20))
def test_messages_of_a_frontend_arrive_in_their_order(messages: list[RequestBegun]) -> None:
    supervisor, frontend = links()
    with supervisor.end, frontend.end:
        assert all(map(frontend.send, messages))
        assert list(supervisor.messages()) == messages


@given(st.lists(st.one_of(FROM_SUPERVISOR, st.none()), max_size=20))
def test_messages_and_connections_keep_their_order(messages: list[Stop | None]) -> None:
    supervisor, frontend = links()
    with supervisor.end, frontend.end:
        for message in messages:
            if message is None:
                here, there = socket.socketpair()
                with here, there:
                    assert supervisor.pass_on(here)
            else:
                supervisor.send(message)
        received = list(frontend.received())
        assert [None if isinstance(each, socket.socket) else each for each in received] == messages
        for each in received:
            if isinstance(each, socket.socket):
                each.close()


def test_passed_connection_works() -> None:
    supervisor, frontend = links()
    here, there = socket.socketpair()
    with supervisor.end, frontend.end, there:
        with here:
            supervisor.pass_on(here)
        (passed,) = frontend.received()
        assert isinstance(passed, socket.socket)
        with passed:
            passed.sendall(b"Hello")
            assert there.recv(5) == b"Hello"


def test_full_link_refuses_and_goes_on_when_it_is_read() -> None:
    supervisor, frontend = links()
    with supervisor.end, frontend.end:
        sent = 0
        while frontend.send(RequestBegun(f"request {sent}")):
            sent += 1
        assert sent > 50
        assert list(supervisor.messages()) == [RequestBegun(f"request {number}") for number in range(sent)]
        assert frontend.send(Draining())


def test_many_requests_are_aborted_in_several_messages() -> None:
    supervisor, frontend = links()
    ids = [f"request {number}" for number in range(2 * IDS + 1)]
    with supervisor.end, frontend.end:
        supervisor.abort(ids)
        received = list(frontend.received())
    assert [each for message in received if isinstance(message, Abort) for each in message.request_ids] == ids


def test_end_of_the_supervisor_asks_to_stop_at_once() -> None:
    supervisor, frontend = links()
    with frontend.end:
        supervisor.end.close()
        assert list(frontend.received()) == [Stop(), Stop()]


def test_last_messages_of_a_process_that_dies_with_others_unread_arrive() -> None:
    """The kernel reports what it had not read first, as a reset."""
    supervisor, frontend = links()
    with supervisor.end:
        supervisor.send(Stop())
        frontend.send(RequestBegun("last"))
        frontend.end.close()
        assert list(supervisor.messages()) == [RequestBegun("last")]
    supervisor, frontend = links()
    with frontend.end:
        frontend.send(Draining())
        supervisor.send(EngineLost())
        supervisor.end.close()
        assert list(frontend.received()) == [EngineLost(), Stop(), Stop()]
