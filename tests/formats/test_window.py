"""The forward reader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.errors import ParseError, TruncatedError
from moonclipfs.formats.window import Window
from moonclipfs.types import BytesSource
from tests.formats.samples import counting

STEPS = st.lists(st.tuples(st.sampled_from(["take", "skip", "byte"]), st.integers(0, 400_000)), max_size=12)


@given(STEPS)
def test_every_step_gives_the_bytes_at_the_position(steps: list[tuple[str, int]]) -> None:
    data = bytes(range(251)) * 4000
    window, position = Window(BytesSource(data), 100, 900_000), 100
    for step, count in steps:
        length = 1 if step == "byte" else count
        if position + length > 900_000:
            with pytest.raises(ParseError):
                window.byte() if step == "byte" else getattr(window, step)(count)
            break
        if step == "take":
            assert window.take(count) == data[position : position + count]
        elif step == "byte":
            assert window.byte() == data[position]
        else:
            window.skip(count)
        position += length
        assert (window.position, window.left) == (position, 900_000 - position)


def test_numbers_and_lines() -> None:
    window = Window(BytesSource(b"\1\2\3\4" + b"\5\0\0\0" + b"\6" + bytes(7) + b"line\n\nrests"), 0, 100)
    assert (window.u16(), window.u16(), window.u32(), window.u64()) == (0x201, 0x403, 5, 6)
    assert (window.line(4), window.line(4)) == (b"line", b"")
    with pytest.raises(ParseError, match="no line end within 4"):
        window.line(4)


def test_a_line_across_the_end_of_what_is_in_memory() -> None:
    data = b"x" * (256 * 1024 - 3) + b"abcdef\n"
    window = Window(BytesSource(data), 0, len(data))
    window.take(1)
    window.skip(256 * 1024 - 4)
    assert window.line(10) == b"abcdef" and window.left == 0


def test_the_end_of_the_file_is_told_from_the_end_of_the_range() -> None:
    for end, kind in ((10, TruncatedError), (50, TruncatedError), (9, ParseError)):
        for step in ("take", "skip"):
            with pytest.raises(ParseError) as error:
                getattr(Window(BytesSource(bytes(10)), 0, end), step)(11)
            assert error.type is kind


def test_what_is_skipped_is_not_read() -> None:
    source = counting(bytes(3_000_000))
    window = Window(source, 0, source.size)
    window.take(1)
    window.skip(2_900_000)
    window.take(1)
    assert source.bytes_read < 600_000 and source.longest <= 256 * 1024
