"""Everything at once: writes, cuts, renames, deletions, drains, gc and kills of the encoder process, on one layer."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from moonclipfs import limits
from moonclipfs.errors import MoonclipError, NotFoundError
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.layer import Layer
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from tests.layers.test_encoder_layer import read, working, write
from tests.store.test_ingest import floats, safetensors


class Soak:
    """A layer, what it should hold, and a random stream of what is done to it."""

    def __init__(self, layer: Layer, seed: int) -> None:
        self.layer = layer
        self.rng = random.Random(seed)
        self.model: dict[bytes, bytearray] = {}

    def step(self) -> None:
        name = b"f%d" % self.rng.randrange(12)
        known = name in self.model
        actions = [self.edit, self.edit, self.cut, self.rename, self.delete] if known else [self.create]
        self.rng.choice(actions)(name)
        if self.model:
            other = self.rng.choice(list(self.model))
            assert read(self.layer, other) == self.model[other]

    def create(self, name: bytes) -> None:
        length = self.rng.choice([100, 20_000, 200_000, 1_500_000])
        data = self.rng.randbytes(length)
        if self.rng.random() < 0.4:
            data = safetensors({f"t{n}": ("F32", floats(self.rng.randrange(3), length // 16)) for n in range(3)})
        self.model[name] = bytearray(data)
        write(self.layer, name, data)

    def edit(self, name: bytes) -> None:
        model = self.model[name]
        at = self.rng.randrange(len(model) + 1000)
        data = self.rng.randbytes(self.rng.randrange(1, 70_000))
        model.extend(bytes(max(0, at + len(data) - len(model))))
        model[at : at + len(data)] = data
        write(self.layer, name, data, at)

    def cut(self, name: bytes) -> None:
        size = self.rng.randrange(len(self.model[name]) * 2 + 1)
        model = self.model[name]
        self.model[name] = model[:size] + bytes(max(0, size - len(model)))
        self.layer.truncate(self.layer.lookup(self.layer.root, name), size, time.time_ns())

    def rename(self, name: bytes) -> None:
        target = b"f%d" % self.rng.randrange(12)
        self.layer.rename(self.layer.root, name, self.layer.root, target, time.time_ns())
        self.model[target] = self.model[name]
        if target != name:
            del self.model[name]

    def delete(self, name: bytes) -> None:
        self.layer.unlink(self.layer.root, name, time.time_ns())
        del self.model[name]

    def check(self) -> None:
        assert sorted(self.layer.names_in(self.layer.root)) == sorted(self.model)
        for name, data in self.model.items():
            assert read(self.layer, name) == data


def disturb(store: Store, layer: Layer, encoder: Encoder, stop: threading.Event, errors: list[BaseException]) -> None:
    """Drain, collect and kill at random until told to stop."""
    rng = random.Random(7)
    with Store.open(store.path, write=True) as other:
        while not stop.is_set():
            try:
                match rng.randrange(4):
                    case 0:
                        encoder.drain(timeout=60, urgent=rng.random() < 0.5)
                    case 1:
                        layer.refresh(time.time_ns())
                        collect(other, wait_seconds=0.2)
                    case 2 if (pid := encoder.status()["pid"]) is not None:
                        os.kill(pid, signal.SIGKILL)
                    case _:
                        layer.sync_all()
            except NotFoundError as error:
                errors.append(error)
            except MoonclipError:
                pass  # a file at which the process was killed twice, or a drain that was too long: tried again
            except BaseException as error:
                errors.append(error)
                return
            stop.wait(rng.random() * 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None], seed: int
) -> None:
    expect_log("encoder process was killed by SIGKILL|safe in staging")
    monkeypatch.setattr(limits, "ENCODE_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(limits, "ENCODE_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(limits, "ENCODE_RETRY_SECONDS", 0.2)
    errors: list[BaseException] = []
    with working(store) as (layer, encoder):
        soak = Soak(layer, seed)
        stop = threading.Event()
        thread = threading.Thread(target=disturb, args=(store, layer, encoder, stop, errors))
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not errors:
                soak.step()
        finally:
            stop.set()
            thread.join()
        assert not errors
        soak.check()
        encoder.drain()
        soak.check()
        layer.sync_all()
        assert layer.staging.used == 0
        assert encoder.status()["encoded_bytes"] > 20_000_000
    with working(store) as (layer, _):
        soak.layer = layer
        soak.check()
        collect(store)
        soak.check()
