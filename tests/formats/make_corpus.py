"""Writes the tiny files of tests/corpus/formats with the real writers of each format.

Run as `python -m tests.formats.make_corpus`; needs torch, safetensors, numpy and gguf. The files are kept, so that the
tests that change them at random need none of these.
"""

from __future__ import annotations

import shutil

import gguf
import numpy
import torch
from safetensors.torch import save_file

from tests.formats.samples import CORPUS


def main() -> None:
    """Write every file anew."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    CORPUS.mkdir(parents=True)
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
