"""The bytes of log records: any damage is found."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import CorruptError, LimitError
from moonclipfs.store.records import (
    TYPES,
    decode_record,
    encode_record,
    read_bound,
    record_name,
    record_sequence,
    record_type,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)


@given(st.integers(1, 10**15), st.sampled_from(TYPES), st.dictionaries(ANY_TEXT, ANY_TEXT | st.integers() | st.none()))
def test_round_trip(sequence: int, type_: str, body: dict[str, object]) -> None:
    body = {key: value for key, value in body.items() if key not in ("sequence", "type")}
    data = encode_record(sequence, type_, body)
    assert decode_record(data, sequence) == {"sequence": sequence, "type": type_, **body}
    assert record_type(data) == type_
    assert data.isascii(), "copies through tools that guess at encodings stay whole"


def test_every_flipped_byte_and_every_truncation_is_found() -> None:
    data = encode_record(7, "bind", {"path": "run1/caf\udce9", "metadata": {"files": 3}})
    for at in range(len(data)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            with pytest.raises(CorruptError, match="log record 7"):
                decode_record(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :], 7)
    for length in range(len(data) - 1):
        with pytest.raises(CorruptError, match="log record 7"):
            decode_record(data[:length], 7)


def test_a_record_under_another_number_is_refused() -> None:
    with pytest.raises(CorruptError, match="log record 8: wrong number"):
        decode_record(encode_record(7, "bind", {}), 8)


def test_hostile_json_is_refused() -> None:
    for text in (b"[]", b"[" * 100_000, b'{"sequence": 7}', b'{"sequence": 7, "type": "__import__"}', b"{", b"7"):
        data = b"moonclipfs-log 1 bind " + hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n"
        with pytest.raises(CorruptError, match="log record 7"):
            decode_record(data, 7)


def test_too_long_a_record_is_refused_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_RECORD_BYTES", 200)
    with pytest.raises(LimitError, match="log record of"):
        encode_record(1, "bind", {"path": "x" * 200})


def test_names_sort_as_numbers() -> None:
    numbers = [1, 9, 10, 99, 12345678, 10**15]
    assert sorted(map(record_name, numbers)) == [record_name(number) for number in numbers]
    assert [record_sequence(record_name(number)) for number in numbers] == numbers
    for stray in ("log/HEAD", "log/1.json", "log/000000000000000x.json", "log/.nfs000000001", "packs/x"):
        assert record_sequence(stray) is None


def test_a_record_is_json_to_read_with_anything() -> None:
    head, _, text = encode_record(7, "unbind", {"paths": ["a"]}).partition(b"\n")
    assert head.startswith(b"moonclipfs-log 1 unbind ")
    assert json.loads(text) == {"sequence": 7, "type": "unbind", "paths": ["a"]}


@given(st.text(min_size=1), st.integers(1, 10**17))
def test_what_a_damaged_bind_record_still_tells(path: str, number: int) -> None:
    body = {"path": path, "number": number, "root": "00", "metadata": {"path": "other", "root": "x"}, "time_ns": 1}
    data = encode_record(7, "bind", body)
    assert read_bound(data) == (path, number)
    assert read_bound(data[: data.rindex(b"time_ns")]) == (path, number)
    assert read_bound(data.replace(b'"number":', b'"nunber":')) == (path, None)
    assert read_bound(data[:90]) is None
