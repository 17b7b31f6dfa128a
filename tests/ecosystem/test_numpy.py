"""NumPy's files on a mount: npz archives, whose writer seeks back, and arrays that are mapped to be written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ecosystem.conftest import Workspace


def arrays(seed: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(0)
    return {
        "weights": random.normal(size=(300, 300)).astype(np.float32) + np.float32(seed * 1e-6),
        "fortran": np.asfortranarray(random.normal(size=(50, 70))),
        "records": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        "words": np.array(["one", "twelve"]),
        "seed": np.array(seed),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_savez(workspace: Workspace, save: Any) -> None:
    for seed in (1, 2, 3):
        (workspace.path / f"run/step-{seed}").mkdir(parents=True)
        save(workspace.path / f"run/step-{seed}/state.npz", **arrays(seed))
    workspace.await_snapshots("run/step-1", "run/step-2", "run/step-3")

    def check() -> None:
        for seed in (1, 2, 3):
            with np.load(workspace.path / f"run/step-{seed}/state.npz") as loaded:
                assert set(loaded) == set(arrays(seed))
                for name, array in arrays(seed).items():
                    assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)

    workspace.everywhere(check)


def test_memmap_to_read_and_write(workspace: Workspace) -> None:
    path = workspace.path / "data/tokens.bin"
    path.parent.mkdir()
    expected = np.zeros((1000, 257), np.int32)
    mapped = np.memmap(path, np.int32, "w+", shape=expected.shape)
    random = np.random.default_rng(0)
    for row in random.permutation(1000)[:400]:
        expected[row] = mapped[row] = random.integers(0, 50_000, 257)
    mapped.flush()
    assert np.array_equal(np.fromfile(path, np.int32).reshape(expected.shape), expected)
    workspace.flush()
    mapped[7], expected[7] = 7, 7  # through the map that was open while the file was encoded
    del mapped
    again = np.memmap(path, np.int32, "r+", shape=expected.shape)
    again[::100] += 1
    expected[::100] += 1
    private = np.memmap(path, np.int32, "c", shape=expected.shape)
    private[:] = -1
    del again, private
    workspace.await_snapshots("data")
    workspace.everywhere(lambda: check_memmap(workspace, expected))


def check_memmap(workspace: Workspace, expected: NDArray[Any]) -> None:
    mapped = np.memmap(workspace.path / "data/tokens.bin", np.int32, "r", shape=expected.shape)
    assert np.array_equal(mapped, expected)


def test_open_memmap_of_npy_is_no_snapshot(workspace: Workspace) -> None:
    """A single npy file is no checkpoint: it is stored all the same, and sealed when it is asked for."""
    path = workspace.path / "activations/layer.npy"
    path.parent.mkdir()
    mapped = np.lib.format.open_memmap(path, "w+", np.float16, (500, 64))
    mapped[:] = np.arange(64)
    mapped.flush()
    del mapped
    workspace.stays_without_snapshot()

    def check() -> None:
        loaded = np.load(path, mmap_mode="r")
        assert loaded.shape == (500, 64) and bool((loaded == np.arange(64)).all())

    workspace.everywhere(check)
