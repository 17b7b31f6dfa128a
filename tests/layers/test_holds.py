"""Holds of the lease, one for each state of the log in use."""

from __future__ import annotations

from typing import Any, cast

import pytest

from moonclipfs.layers.holds import Holds
from moonclipfs.store.leases import Lease


class FakeLease:
    """Remembers what is held."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def hold(self, sequence: int) -> Any:
        self.held.append(sequence)
        lease = self

        class Hold:
            def release(self) -> None:
                lease.held.remove(sequence)

        return Hold()


def test_a_state_is_held_while_it_is_current_or_used() -> None:
    lease = FakeLease()
    holds = Holds(cast(Lease, lease))
    holds.add(3)
    holds.pin(3)
    holds.pin(3)
    holds.add(5)
    holds.unpin(3)
    holds.sweep()
    assert lease.held == [3, 5]
    holds.unpin(3)
    holds.sweep()
    assert lease.held == [3, 5]
    holds.unpin(3)
    assert lease.held == [3, 5]
    holds.sweep()
    assert lease.held == [5]


def test_a_state_that_is_used_again_stays_held_once() -> None:
    lease = FakeLease()
    holds = Holds(cast(Lease, lease))
    holds.add(3)
    holds.add(3)
    holds.unpin(3)
    holds.sweep()
    assert lease.held == [3]


def test_what_is_in_use_moves_to_another_lease() -> None:
    first, second = FakeLease(), FakeLease()
    holds = Holds(cast(Lease, first))
    for sequence in (3, 5, 7):
        holds.add(sequence)
    holds.unpin(5)
    holds.move(cast(Lease, first))
    assert first.held == [3, 5, 7]
    holds.move(cast(Lease, second))
    assert second.held == [3, 7]
    holds.unpin(3)
    holds.sweep()
    assert second.held == [7]
    holds.move(None)
    holds.add(9)
    holds.move(cast(Lease, first))
    assert first.held[-2:] == [7, 9]


def test_a_pin_lasts_as_long_as_its_block() -> None:
    lease = FakeLease()
    holds = Holds(cast(Lease, lease))
    holds.add(3)
    with pytest.raises(KeyError), holds.pinned(3):
        holds.unpin(3)
        holds.sweep()
        assert lease.held == [3]
        raise KeyError
    holds.sweep()
    assert lease.held == []


def test_without_a_lease_nothing_is_held() -> None:
    holds = Holds(None)
    holds.add(1)
    holds.unpin(1)
    holds.sweep()
