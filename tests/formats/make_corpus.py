"""Writes the tiny files of tests/corpus/formats: whole ones with the real writers, hostile ones by hand.

Run as `python -m tests.formats.make_corpus`; needs torch, safetensors, numpy and gguf. The files are kept, so that the
tests that read and change them need none of these.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile

import gguf
import numpy
import torch
from safetensors.torch import save_file

from tests.formats.samples import CORPUS, Opcodes, entry, safetensors, torch_zip, zip_bytes


def main() -> None:
    """Write every file anew."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    (CORPUS / "hostile").mkdir(parents=True)
    write_whole()
    for name, data in hostile().items():
        (CORPUS / "hostile" / name).write_bytes(data)


class RunsCode:
    """Its pickle makes a file where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/moonclipfs-test-pwned",)


def hostile() -> dict[str, bytes]:
    """Return files that break other readers, by name: the id of the public report, then what is wrong."""
    two = safetensors({"a": entry("U8", [4], 0, 4), "b": entry("F32", [2], 4, 12)}, b"abcdefghijkl")
    one = json.dumps(entry("U8", [1], 0, 1)), json.dumps(entry("U8", [1], 1, 2))
    torch_members = torch_zip(
        Opcodes().op(b"}").text("w").tensor("0", 2, (2,), (1,)).op(b"s").done(), {"0": b"abcdefgh"}
    )
    archive = zip_bytes(torch_members)
    nested = b"\x80\x02" + b"]" * 2000 + b"N" + b"a" * 2000 + b"."
    return {
        "R051_short_by_one.safetensors": two[:-1],
        "R051_short_header.safetensors": two[:40],
        "R051_no_directory.pt": archive[:-30],
        "R053_key_twice.safetensors": safetensors(f'{{"a":{one[0]},"a":{one[1]}}}', b"xy"),
        "R055_shape_too_large.safetensors": safetensors({"w": entry("F32", [1000, 1000], 0, 4)}, b"abcd"),
        "R055_overlap.safetensors": safetensors({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"abcdef"),
        "R055_reversed.safetensors": safetensors({"w": entry("U8", [4], 8, 4)}, b"abcdefgh"),
        "R055_overflow.safetensors": safetensors({"w": entry("U8", [2**32, 2**32], 0, 4)}, b"abcd"),
        "R055_header_length.safetensors": struct.pack("<Q", 0xFFFFFFFF) + b"{}",
        "R061_descriptors.pt": zip_bytes(torch_members, descriptor=True),
        "R061_appended.pt": appended(archive),
        "R061_overlap.pt": archive.replace(
            struct.pack("<QQQ", 6, 6, archive.index(b"PK\3\4", 4)), struct.pack("<QQQ", 6, 6, 0)
        ),
        "R063_odd_f4.safetensors": safetensors({"w": entry("F4", [3], 0, 2)}, b"ab"),
        "R067_runs_code.pt": zip_bytes(torch_zip(pickle.dumps({"w": RunsCode()}, 2), {"0": b"abcdefgh"})),
        "R067_deep.pt": zip_bytes(torch_zip(nested, {"0": b"abcdefgh"})),
        "R067_runs_code.pkl": pickle.dumps(RunsCode(), 2),
        "R069_metadata_number.safetensors": safetensors({"__metadata__": {"k": 1}, "w": entry("U8", [1], 0, 1)}, b"x"),
        "objects.npy": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }") + b"x",
        "huge_shape.npy": npy("{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999, 9999999999), }"),
        "huge_counts.gguf": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64),
        "huge_array.gguf": b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, 1)
        + b"a"
        + struct.pack("<IIQ", 9, 8, 1 << 60)
        + bytes(64),
    }


def npy(header: str) -> bytes:
    """Return the head of a .npy file."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode()


def appended(archive: bytes) -> bytes:
    """Return an archive to which Python's zipfile added a compressed member."""
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(zipfile.ZipInfo("archive/extra.json"), b"{}" * 100)
    return buffer.getvalue()


def write_whole() -> None:
    """Write a file of every format."""
    generator = torch.Generator().manual_seed(1)
    weight, experts = torch.randn(4, 6, generator=generator), torch.randn(3, 4, 5, generator=generator)
    state = {
        "model": {"weight": weight, "bias": torch.arange(4, dtype=torch.bfloat16), "tied": weight, "rows": weight[1:3]},
        "transposed": weight.t(),
        "experts": experts,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight * 0.1}}, "lr": [0.1, 0.2]},
        "small": weight.to(torch.float8_e4m3fn),
    }
    torch.save(state, CORPUS / "torch.pt")
    torch.save(state, CORPUS / "torch_protocol4.pt", pickle_protocol=4)
    torch.save(state, CORPUS / "torch_legacy.pt", _use_new_zipfile_serialization=False)
    save_file({"weight": weight, "experts": experts.to(torch.bfloat16), "empty": torch.zeros(0)},
              CORPUS / "model.safetensors", {"format": "pt"})  # fmt: skip
    numpy.save(CORPUS / "array.npy", weight.numpy())
    numpy.save(CORPUS / "fortran.npy", numpy.asfortranarray(experts.numpy()))
    numpy.savez(CORPUS / "arrays.npz", weight=weight.numpy(), words=numpy.array(["a", "bc"]), steps=numpy.int64(3))
    writer = gguf.GGUFWriter(CORPUS / "model.gguf", "llama")
    writer.add_name("tiny")
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("token_embd.weight", weight.numpy())
    writer.add_tensor("blk.0.ffn.weight", numpy.arange(68, dtype=numpy.uint8).reshape(2, 34),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
