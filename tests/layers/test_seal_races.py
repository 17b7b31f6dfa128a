"""What is renamed or removed while it is sealed: by whoever publishes, and over kills."""

from __future__ import annotations

from typing import Any

import pytest

from moonclipfs.layers.layer import Layer
from moonclipfs.layers.openunits import what_is_missing
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.log import Log
from moonclipfs.store.store import Store
from tests.layers.sealkit import LocalEncoder, model, put, stored, tree

NOW = 1_000.0
QUIET = 60.0


def names(store: Store) -> dict[str, int]:
    return {path: version.number for path, version in store.names().bound().items()}


class _KilledError(Exception):
    """Ends a seal where a kill would."""


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_a_kill_while_a_sealed_directory_is_renamed_or_removed(
    store: Store, monkeypatch: pytest.MonkeyPatch, removed: bool, settled: bool
) -> None:
    """What was renamed or removed while it was sealed stays so after a kill, before anything else is done."""
    layer = Layer.open(store, "here")
    put(layer, "run/a/x", b"1")
    call, move, unbind = LocalEncoder.call, Log.move, Log.append

    def slow(encoder: LocalEncoder, op: str, **arguments: Any) -> Any:
        answer = call(encoder, op, **arguments)
        if removed:
            layer.unlink(layer.resolve(b"run/a"), b"x", 5)
            layer.rmdir(layer.resolve(b"run"), b"a", 6)
        else:
            layer.rename(layer.resolve(b"run"), b"a", layer.root, b"b", 5)
        if not settled:
            raise _KilledError
        monkeypatch.setattr(Log, "move", killed)
        monkeypatch.setattr(Log, "append", killed)
        return answer

    def killed(*_: object, **__: object) -> None:
        raise _KilledError

    monkeypatch.setattr(LocalEncoder, "call", slow)
    with pytest.raises(_KilledError):
        Sealer(layer, LocalEncoder(layer), seal_after=None).seal(b"run/a")
    layer.close()
    monkeypatch.setattr(LocalEncoder, "call", call)
    monkeypatch.setattr(Log, "move", move)
    monkeypatch.setattr(Log, "append", unbind)
    again = Layer.open(store, "here")
    expected = {} if removed else {"b/x": b"1"}
    assert tree(again) == expected
    Sealer(again, LocalEncoder(again), seal_after=None).tick(NOW)
    again.push_names()
    again.refresh(9)
    assert tree(again) == expected and names(store) == ({} if removed else {"b": 1})
    (version,) = store.names().versions("run/a" if removed else "b")
    assert stored(store, version) == {"x": b"1"}
    again.close()


def test_a_unit_that_is_removed_while_it_is_looked_at_is_no_trouble(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer.open(store, "here")
    sealer = Sealer(layer, LocalEncoder(layer), seal_after=QUIET)
    put(layer, "run/a/model.safetensors", model())

    def remove(*arguments: Any) -> list[str]:
        found = what_is_missing(*arguments)
        layer.unlink(layer.resolve(b"run/a"), b"model.safetensors", 5)
        layer.rmdir(layer.resolve(b"run"), b"a", 6)
        return found

    monkeypatch.setattr("moonclipfs.layers.seal.what_is_missing", remove)
    sealer.tick(NOW)
    sealer.tick(NOW + QUIET)
    sealer.tick(NOW + 2 * QUIET)
    assert names(store) == {} and sealer.missing() == {}
    layer.close()
