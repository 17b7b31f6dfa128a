"""Mounts, as the tests of mounts have them."""

from __future__ import annotations

from tests.fuse.conftest import fuse, live, mounter

__all__ = ["fuse", "live", "mounter"]
