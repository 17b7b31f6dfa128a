"""FORMAT.md tells the truth: its worked examples are parsed by the code, and made by it again."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np

from moonclipfs import limits
from moonclipfs.layers import records as layer_records
from moonclipfs.layers.records import Make
from moonclipfs.layers.records import decode_record as decode_layer_record
from moonclipfs.layers.records import encode_record as encode_layer_record
from moonclipfs.store import directories, packfile, recipes, records, segments
from moonclipfs.store.frames import encode_frame
from moonclipfs.store.objects import CONTEXTS, object_id
from moonclipfs.store.replay import State
from moonclipfs.types import EntryType, Extent, Kind

DOCUMENT = (Path(recipes.__file__).parent / "FORMAT.md").read_text()


def example(name: str) -> bytes:
    match = re.search(rf"```hex {name}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert match, f"no worked example {name!r} in FORMAT.md"
    return bytes.fromhex(match[1])


def test_recipe_example() -> None:
    data = example("recipe")
    recipe = recipes.decode_recipe(data)
    assert recipe.extents == (Extent(8, literal=b"\x10" + bytes(7)), Extent(4096), Extent(100, bytes(range(32)), 4))
    assert recipe.size == 4204
    assert recipes.encode_recipe(recipe) == data
    assert object_id(Kind.RECIPE, data).hex() in DOCUMENT


def test_directory_example() -> None:
    data = example("directory")
    entries = directories.decode_directory(data)
    assert list(entries) == [b"latest", b"model.pt"]
    assert entries[b"latest"].type is EntryType.SYMLINK and entries[b"latest"].target == b"model.pt"
    model = entries[b"model.pt"]
    assert (model.size, model.attributes.mode, model.attributes.xattrs) == (4204, 0o644, {b"user.k": b"v"})
    assert model.child == object_id(Kind.RECIPE, example("recipe"))
    assert directories.encode_directory(entries.values()) == data


def test_pack_example() -> None:
    data = example("pack")
    offset, count, digest = packfile.parse_trailer(data[-packfile.TRAILER.size :], len(data))
    table = data[offset : len(data) - packfile.TRAILER.size]
    entries = packfile.parse_footer(table, count, digest, offset)
    start, length = int(entries["offset"][0]), int(entries["encoded_length"][0])
    assert data[start : start + length] == b"hello" and int(entries["check"][0]) == packfile.check_of(b"hello")
    header = data[start - packfile.RECORD_BYTES : start]
    assert packfile.parse_record_header(header).tobytes() == entries[:1].tobytes()
    rebuilt = packfile.pack_header() + packfile.record_header(entries[0]) + b"hello"
    assert rebuilt + packfile.footer(entries, len(rebuilt)) == data


def test_journal_example() -> None:
    data = example("journal")
    extent = segments.measure_segment(io.BytesIO(data + bytes(100)), Path("journal"))
    assert extent.header == segments.Header(True, 0x2A2B2C2D, bytes(range(16)), bytes(range(16, 32)), 1)
    assert (extent.end, extent.torn) == (len(data), False)
    (frame,) = segments.record_payloads(io.BytesIO(data), extent)
    refs = [(Kind.RECIPE, object_id(Kind.RECIPE, example("recipe")))]
    assert segments.record_refs(frame.payload) == refs
    record = decode_layer_record(frame.payload[1:])
    assert isinstance(record, Make) and record.name == b"model.pt" and record.mode == 0o644
    rebuilt = segments.encode_header(extent.header)
    for payload in (segments.encode_mark(0), segments.RECORD + encode_layer_record(record, refs)):
        rebuilt += encode_frame(payload, len(rebuilt), extent.header.salt)
    assert rebuilt == data


def test_every_type_of_a_journal_record_has_its_place() -> None:
    types = ", ".join(f"`{type_.__name__}`" for type_ in layer_records._TYPES)
    assert f"{types}." in DOCUMENT


def test_log_example() -> None:
    match = re.search(r"```text log-record\n(.*?)```", DOCUMENT, re.DOTALL)
    assert match, "no worked log record in FORMAT.md"
    record = records.decode_record(match[1].encode(), 1)
    assert record["path"] == "run1/checkpoint-500" and record["number"] == 1
    assert bytes.fromhex(record["root"]) == object_id(Kind.DIRECTORY, example("directory"))
    state = State()
    state.apply(record)
    bound = state.bound("run1/checkpoint-500")
    assert bound is not None and bound.root.hex() == record["root"]


def test_every_record_type_and_limit_is_described() -> None:
    assert all(f"| `{name}` |" in DOCUMENT for name in records.TYPES)
    for number in (limits.OBJECT_BYTES // limits.MIB, limits.LOG_RECORD_BYTES // limits.MIB, limits.CHAIN_DEPTH):
        assert f" {number} " in DOCUMENT.replace("\n", " ")
    assert f"{limits.PACK_ENTRIES:,} entries" in DOCUMENT


def test_entry_table_gives_the_real_offsets() -> None:
    for name, offset in (("label", 96), ("offset", 104), ("base_start", 128), ("kind", 136), ("depth", 138)):
        assert packfile.ENTRY.fields is not None and packfile.ENTRY.fields[name][1] == offset
    assert packfile.ENTRY.itemsize == 144 and packfile.RECORD_BYTES == 152


def test_ids() -> None:
    assert object_id(Kind.DATA, b"hello").hex() in DOCUMENT
    assert all(context in DOCUMENT for context in CONTEXTS.values())


def test_numbers_in_the_entry_are_little_endian() -> None:
    assert all(np.dtype(packfile.ENTRY[name]).byteorder in "<=|" for name in packfile.ENTRY.names or ())
