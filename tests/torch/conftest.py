"""Places in which experts lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moonclipfs.layers.basing import BaseOf
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlay import Overlay
from moonclipfs.store.store import Store
from tests.torch.expertkit import Place


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors are worked on fastest by one thread."""
    torch.set_num_threads(1)


@pytest.fixture
def overlay(store: Store) -> Iterator[Overlay]:
    """An overlay over nothing, which no mount shows."""
    with Overlay.create(store, "trial", BaseOf()) as made:
        yield made


@pytest.fixture(params=["disk", "overlay"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A directory for experts that is not there yet: on the disk, and in an overlay."""
    if request.param == "disk":
        return tmp_path / "experts"
    return LayerPath(request.getfixturevalue("overlay"), "experts")
