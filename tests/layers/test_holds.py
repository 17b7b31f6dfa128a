"""Holds of the lease, one for each state of the log in use."""

from __future__ import annotations

from typing import Any, cast

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


def test_without_a_lease_nothing_is_held() -> None:
    holds = Holds(None)
    holds.add(1)
    holds.unpin(1)
    holds.sweep()
