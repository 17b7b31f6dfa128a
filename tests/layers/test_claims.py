"""Claims: what they keep, when they are moved on, and that they end."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from moonclipfs.errors import UsageError
from moonclipfs.layers.claims import Claim, Claims
from moonclipfs.store.leases import live_leases
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID
from tests.store.kit import noise, publish


@pytest.fixture
def claims(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Claims]:
    """Claims on a store of the snapshots a and b, whose log is followed only when a test says so."""
    monkeypatch.setattr("moonclipfs.limits.LEASE_REFRESH_SECONDS", 3600.0)
    for number, name in enumerate("ab"):
        publish(store, name, {"f": noise(number)})
    opened = Claims(Store.open(store.path, purpose="claims"), owned=True)
    yield opened
    opened.close()


def claim(claims: Claims, name: str) -> Claim:
    with claims.held() as sequence:
        return claims.claim(claims.store.resolve(name).root, sequence)


def told(store: Store) -> tuple[int, int | None]:
    """What the lease of the reader says: the record it has seen, and the oldest that it holds."""
    (lease,) = [lease for lease in live_leases(store.path) if lease.purpose == "claims"]
    return lease.seen, lease.hold


def test_a_claim_follows_the_log_until_its_version_is_forgotten(store: Store, claims: Claims) -> None:
    first, second = claim(claims, "a"), claim(claims, "b")
    assert told(store) == (2, 2)
    store.log.unbind(["a"])
    claims.follow()
    assert told(store) == (3, 3)
    store.log.forget([("a", 1)])
    publish(store, "c", {"f": noise(3)})
    claims.follow()
    assert told(store) == (5, 3)
    del first
    claims.follow()
    assert told(store) == (5, 5)
    del second
    claims.follow()
    assert not [lease for lease in live_leases(store.path) if lease.purpose == "claims"]


def test_a_block_that_holds_outlasts_what_others_see(store: Store, claims: Claims) -> None:
    with claims.held():
        store.log.forget([("a", 1)])
        claims.store.names()
        assert told(store) == (3, 2)
    assert told(store) == (3, None)


def test_claims_of_one_version_are_counted(store: Store, claims: Claims) -> None:
    keep = claims.claim(NO_ID, 0)
    some = [claim(claims, "a") for _ in range(3)]
    for _ in range(2):
        some.pop()
        claims.follow()
        assert told(store) == (2, 2)
    some.pop()
    claims.follow()
    assert told(store) == (2, None)
    del keep
    claims.follow()
    with pytest.raises(UsageError, match="closed"):
        claim(claims, "a")


def test_dropping_a_claim_takes_no_lock(store: Store, claims: Claims) -> None:
    """The collector runs anywhere, also where the lock of the claims or of the lease is taken."""
    lease = claims.store.lease
    assert lease is not None
    circle: list[object] = [claim(claims, "a")]
    circle.append(circle)
    del circle
    with claims._lock, lease._lock:
        gc.collect()
    claims.follow()
    assert not [lease for lease in live_leases(store.path) if lease.purpose == "claims"]


def test_a_claim_in_a_forked_child_is_that_of_its_parent(store: Store, claims: Claims) -> None:
    mine = claim(claims, "a")
    child = os.fork()
    if child == 0:
        del mine
        claims.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    claims.follow()
    assert told(store) == (2, 2)
    del mine
