"""Messages between a mount and its encoder process."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from moonclipfs.layers.wire import Channel


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_an_offer_to_who_does_not_read_waits_for_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """What was taken arrives whole, and in order."""
    sender, receiver = Channel(ends[0]), Channel(ends[1])
    count = 0
    while sender.offer({"op": "urgent", "number": count}):
        count += 1
    assert count > 10
    assert [receiver.receive() for _ in range(count)] == [{"op": "urgent", "number": at} for at in range(count)]
    assert sender.offer({"op": "urgent"})
