"""Whatever a file holds, it has a layout that covers it, found with a bounded amount of reading."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.formats.cut import cut
from moonclipfs.formats.layout import RegionKind
from moonclipfs.formats.sniff import parse
from tests.formats.samples import (
    CORPUS_FILES,
    HOSTILE_FILES,
    SMALL_RULES,
    check_layout,
    check_pieces,
    counting,
    layout_of,
    mutations,
)

CORPUS_DATA = [path.read_bytes() for path in CORPUS_FILES]
FORMATS = {
    "array.npy": "npy", "arrays.npz": "npz", "fortran.npy": "npy", "model.gguf": "gguf",
    "model.safetensors": "safetensors", "torch.pt": "torch", "torch_legacy.pt": "torch-legacy",
    "torch_protocol4.pt": "torch",
}  # fmt: skip


def check_total(data: bytes) -> None:
    """Parse and cut `data`; fail if anything raises, or reads far more than there is."""
    source = counting(data)
    layout = parse(source)
    check_layout(layout, len(data))
    assert source.bytes_read <= 20 * len(data) + 4096 and source.longest <= limits.MIB
    check_pieces(data, layout, SMALL_RULES)
    assert sum(piece.length for piece in cut(source, layout, SMALL_RULES)) == len(data)


@pytest.mark.parametrize("path", CORPUS_FILES, ids=lambda path: path.name)
def test_every_file_of_the_corpus_is_understood(path: Path) -> None:
    layout = layout_of(path.read_bytes())
    assert layout.format == FORMATS[path.name] and not layout.reason and layout.tensors
    assert sum(region.kind is RegionKind.TENSOR for region in layout.regions) >= 1
    check_total(path.read_bytes())


@pytest.mark.parametrize("path", CORPUS_FILES, ids=lambda path: path.name)
def test_R051_every_prefix_of_a_file_is_covered(path: Path) -> None:
    data = path.read_bytes()
    whole = layout_of(data)
    for length in range(0, len(data), 1 if len(data) < 1000 else 7):
        layout = layout_of(data[:length])
        assert layout.reason or layout.tensors == whole.tensors  # only padding is missing


REASONS = {
    "R051_short_by_one.safetensors": "data short by 1 byte",
    "R051_short_header.safetensors": "header short by",
    "R051_no_directory.pt": "central directory is missing",
    "R053_key_twice.safetensors": 'DuplicateKey("a")',
    "R055_shape_too_large.safetensors": 'ShapeMismatch("w")',
    "R055_overlap.safetensors": 'Overlap("b")',
    "R055_reversed.safetensors": 'ReversedRange("w")',
    "R055_overflow.safetensors": 'Overflow("w")',
    "R055_header_length.safetensors": "at most",
    "R061_descriptors.pt": "",
    "R061_appended.pt": "",
    "R061_overlap.pt": "no header of that name",
    "R063_odd_f4.safetensors": 'MisalignedSize("w")',
    "R067_runs_code.pt": "",
    "R067_deep.pt": "",
    "R067_runs_code.pkl": "no known format",
    "R069_metadata_number.safetensors": "not a string",
    "objects.npy": "elements of type |O",
    "huge_shape.npy": "Overflow",
    "huge_counts.gguf": "at most",
    "huge_array.gguf": "short by",
}


@pytest.mark.parametrize("path", HOSTILE_FILES, ids=lambda path: path.name)
def test_every_hostile_file_is_covered_with_its_reason(path: Path) -> None:
    reason = layout_of(path.read_bytes()).reason
    assert REASONS[path.name] in reason and bool(reason) == bool(REASONS[path.name])
    check_total(path.read_bytes())
    assert not Path("/tmp/moonclipfs-test-pwned").exists()


CHANGES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 1 << 16), st.integers(0, 1 << 16)), min_size=1, max_size=5
)


@given(st.sampled_from(CORPUS_DATA), CHANGES)
def test_changed_files_are_covered(data: bytes, changes: list[tuple[int, int, int]]) -> None:
    for changed in mutations(data, changes):
        check_total(changed)


MAGICS = [b"", b"PK\3\4", b"PK\5\6", b"GGUF\3\0\0\0", b"\x93NUMPY\1\0", b"\x10\0\0\0\0\0\0\0{"]
MAGICS += [b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."]


@given(st.sampled_from(MAGICS), st.binary(max_size=300))
@example(b"", b"")
@example(b"PK\3\4", b"PK\5\6" + bytes(18))
@example(b"\x08\0\0\0\0\0\0\0{", b'"a":{}}')
def test_any_bytes_after_a_magic_are_covered(magic: bytes, data: bytes) -> None:
    check_total(magic + data)


def test_names_do_not_matter_and_unknown_bytes_have_a_reason() -> None:
    assert layout_of(b"hello").reason == "no known format"
    assert layout_of(b"").reason == "the file is empty" and layout_of(b"").regions == ()
