"""Records of a journal are read back as they were written; any other bytes are damage, never another exception."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.errors import CorruptError
from moonclipfs.layers import records
from moonclipfs.layers.records import (
    Contents,
    Counters,
    Make,
    Record,
    SetAttributes,
    decode_record,
    encode_record,
)
from moonclipfs.store.segments import RECORD, record_refs
from moonclipfs.types import NO_ID, Kind

NUMBERS = st.integers(-(2**63), 2**64 - 1)
VALUES = st.recursive(
    st.none() | NUMBERS | st.binary(max_size=40) | st.booleans(), lambda inner: st.lists(inner, max_size=3).map(tuple)
)
REFS = st.lists(st.tuples(st.sampled_from(Kind), st.binary(min_size=32, max_size=32)), max_size=4)


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    """A record of any type; the values of its fields are of any type too."""
    type_ = draw(st.sampled_from(records._TYPES))
    count = len(type_._fields)
    record: Record = type_(*(draw(VALUES) for _ in range(count)))
    return record


@given(any_record(), REFS)
def test_a_record_is_read_back(record: Record, refs: list[tuple[Kind, bytes]]) -> None:
    data = encode_record(record, refs)
    assert decode_record(data) == record and type(decode_record(data)) is type(record)
    assert record_refs(RECORD + data) == [(kind, one) for kind, one in refs if one != NO_ID]


@pytest.mark.parametrize(
    "record",
    [
        Make(2**63 - 1, 1, b"\xff\x00name", 1, 0o7777, 0, 2**32 - 1, b"", -(10**18)),
        SetAttributes(5, None, 0, None, -1, 2**62, 0),
        Contents(5, 2**40, 1, 2, True, b"r" * 32, ((0, 4096, 2, 7), (4096, 1, 0, 0)), ((7, 0, b"\0" * 4096),), False),
        Counters(1, 2, 3, 4),
    ],
)
def test_records_of_real_values(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


def test_codes_stay_what_they_are() -> None:
    """They are on disks: a new type comes last."""
    names = ["Make", "Adopt", "Link", "Remove", "Rename", "SetAttributes", "SetXattr", "Contents", "Stored"]
    names += ["Captured", "Sealed", "Dropped", "Unbound", "Moving", "Whole", "Counters"]
    assert [type_.__name__ for type_ in records._TYPES][: len(names)] == names


def decoded(data: bytes) -> Record | None:
    """The record that `data` is, None for damage."""
    try:
        return decode_record(data)
    except CorruptError as error:
        assert str(error).startswith("journal: not a record")
        return None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_damage(data: bytes) -> None:
    decoded(data)


@given(any_record(), st.data())
def test_a_changed_record_is_a_record_or_damage(record: Record, data: st.DataObject) -> None:
    whole = encode_record(record)
    at = data.draw(st.integers(0, len(whole) - 1))
    decoded(whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :])
    assert decoded(whole[:at]) is None
    assert decoded(whole + b"\0") is None


@pytest.mark.parametrize(
    "value",
    [
        *(None, 7, {"a": 1}, [], [1], [0, []], [-1, [], 1], [99, [], 1], ["1", []], [None, []], [1.0, []]),
        *([1, [], 1], [2**63, []], [True, []], [[1], []], [16, [], 1, 2, 3, 4, 5]),
    ],
)
def test_values_that_are_no_records(value: object) -> None:
    assert decoded(msgpack.packb(value)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x91" * 5000,  # arrays in arrays
        b"\x92\x01" * 2000 + b"\x90",
        b"\xc7\x04\x01abcd",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a time
        b"\x93\x01\x90\xd9\x02\xff\xff",  # text that is not UTF-8
        b"\x93\x01\x90\x81\x90\x90",  # a map with a key that cannot be one
    ],
)
def test_hostile_bytes(data: bytes) -> None:
    assert decoded(data) is None
