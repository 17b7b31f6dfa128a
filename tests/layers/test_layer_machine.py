"""Random changes of a layer, against the reference model."""

from __future__ import annotations

import hypothesis
import pytest

from tests.layers.machine import LayerMachine

LayerMachine.TestCase.settings = hypothesis.settings(max_examples=15, stateful_step_count=25, deadline=None)


class TestLayer(LayerMachine.TestCase):
    """The tree is what POSIX says, after every change, and after every end and crash."""


class _Long(LayerMachine):
    pass


_Long.TestCase.settings = hypothesis.settings(max_examples=400, stateful_step_count=60, deadline=None)


@pytest.mark.slow
class TestLayerForLong(_Long.TestCase):
    """The same, for longer."""
