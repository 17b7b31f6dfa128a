"""Sizes, names and tables as they are printed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.cli.gc import print_gc
from moonclipfs.cli.output import emit_json, human, printable, ratio, table, when
from moonclipfs.store.gc import GcReport


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1048575, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (-2048, "-2.0 KiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_sizes_are_in_powers_of_1024(size: int, text: str) -> None:
    assert human(size) == text


@pytest.mark.parametrize(("raw", "stored", "text"), [(3, 2, "1.50x"), (500, 1, "500x"), (0, 0, "-"), (7, 0, "-")])
def test_ratio(raw: int, stored: int, text: str) -> None:
    assert ratio(raw, stored) == text


def test_a_time_that_no_calendar_holds_is_printed_all_the_same() -> None:
    assert when(1 << 80) == f"{1 << 80} ns"


def test_names_that_would_move_the_cursor_are_escaped() -> None:
    assert printable("plain name-ü") == "plain name-ü"
    assert printable(b"\x1b[2Jx\n\xff") == "\\x1b[2Jx\\x0a\\xff"
    assert printable("a\u202eb\u2028") == "a\\u{202e}b\\u{2028}"


@given(st.binary())
def test_any_name_prints_as_printable_text(name: bytes) -> None:
    shown = printable(name)
    assert shown.isprintable()
    assert printable(shown) == shown


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    table([("a", "1"), ("long", "100")], ("NAME", "N"), right=(1,))
    assert capsys.readouterr().out == "NAME    N\na       1\nlong  100\n"
    table([])
    assert capsys.readouterr().out == ""


def test_json_keeps_bytes_that_are_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"path": b"a\xff".decode("utf-8", "surrogateescape")})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out)["path"].encode("utf-8", "surrogateescape") == b"a\xff"


def test_a_gc_that_could_only_copy_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_gc(GcReport(live_bytes=3 << 20, rebased_bytes=2 << 20))
    assert capsys.readouterr().out == "copied 2.0 MiB, so that a later run can free more; 3.0 MiB in use\n"
