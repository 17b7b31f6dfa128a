"""Experts told by names and shapes of tensors: every layout that is known, and nothing where it is not sure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.formats import sniff
from moonclipfs.formats.experts import Component, Layers, header, header_length, recognise
from moonclipfs.formats.layout import Layout, Tensor
from moonclipfs.formats.safetensors import parse
from moonclipfs.types import BytesSource, DType
from tests.formats.samples import CORPUS_FILES, HOSTILE_FILES

Shapes = Mapping[str, tuple[DType, tuple[int, ...]]]
F, B, U8, F8 = DType.F32, DType.BF16, DType.U8, DType.F8_E4M3


def layout(tensors: Shapes, format_: str = "safetensors") -> Layout:
    """A file with these tensors, one behind the other from byte 100 on."""
    made, at = [], 100
    for name, (dtype, shape) in tensors.items():
        length = math.prod(shape) * dtype.bits // 8
        made.append(Tensor(name, dtype, shape, at, length, dtype_name=dtype.name))
        at += length
    return Layout(format_, (), tuple(made))


def found(tensors: Shapes, format_: str = "safetensors", file: str = "model.safetensors") -> Layers:
    """The experts of one file with these tensors."""
    return recognise([(file, layout(tensors, format_))])


def names(layers: Layers, layer: str, number: int) -> list[str]:
    """The tensors of one expert, sorted."""
    return sorted(part.name for part in layers[layer][number])


def numbers(layers: Layers) -> dict[str, list[int]]:
    """The experts of each layer."""
    return {layer: list(experts) for layer, experts in layers.items()}


def each(pattern: str, parts: Mapping[str, tuple[DType, tuple[int, ...]]], layer: int = 3, experts: int = 4) -> Shapes:
    """The tensors of some experts: LAYER, EXPERT and PART of the pattern filled in."""
    return {
        pattern.replace("LAYER", str(layer)).replace("EXPERT", str(number)).replace("PART", part): shape
        for number in range(experts)
        for part, shape in parts.items()
    }


QWEN = {"gate_proj.weight": (B, (6, 4)), "up_proj.weight": (B, (6, 4)), "down_proj.weight": (B, (4, 6))}
DEEPSEEK = {
    f"{name}_proj.{kind}": (F8, (128, 256)) if kind == "weight" else (F, (1, 2))
    for name in ("gate", "up", "down")
    for kind in ("weight", "weight_scale_inv")
}
MIXTRAL = {"w1.weight": (F, (8, 4)), "w2.weight": (F, (4, 8)), "w3.weight": (F, (8, 4))}


@pytest.mark.parametrize(
    ("pattern", "parts", "directory"),
    [
        ("model.layers.LAYER.block_sparse_moe.experts.EXPERT.PART", MIXTRAL, "L003"),  # Mixtral, PhiMoE, MiniMax
        ("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, "L003"),  # Qwen2-MoE, Qwen3-MoE, OLMoE, Ernie, GLM
        ("model.layers.LAYER.mlp.experts.EXPERT.PART", DEEPSEEK, "L003"),  # DeepSeek-V2 and -V3
        ("model.language_model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, "L003"),
        ("model.layers.LAYER.feed_forward.experts.EXPERT.PART", QWEN, "L003"),  # Jamba
        ("encoder.block.LAYER.layer.1.mlp.experts.expert_EXPERT.PART", {"wi.weight": (F, (8, 4))}, "encoder.L003"),
        ("model.decoder.layers.LAYER.ffn.experts.expert_EXPERT.PART", {"fc1.weight": (F, (8, 4))}, "decoder.L003"),
        (
            "decoder.layers.LAYER.mlp.experts.local_experts.EXPERT.PART",
            {"linear_fc1.weight": (B, (8, 4))},
            "decoder.L003",
        ),
        ("blk.LAYER.ffn_gate.EXPERT.weight", {"": (F, (8, 4))}, "L003"),  # GGUF of old
    ],
)
def test_tensors_of_one_expert_each_make_a_file(pattern: str, parts: Shapes, directory: str) -> None:
    tensors = each(pattern, parts)
    layers = found({**tensors, "model.embed_tokens.weight": (B, (4, 4)), "model.layers.3.mlp.gate.weight": (B, (4, 4))})
    assert numbers(layers) == {directory: [0, 1, 2, 3]}
    expected = sorted(parts) if "PART" in pattern else ["ffn_gate.weight"]
    assert names(layers, directory, 2) == expected
    by_name = {tensor.name: tensor for tensor in layout(tensors).tensors}
    for number, components in layers[directory].items():
        for part in components:
            whole = by_name[part.origin]
            assert (part.length, part.dtype, part.shape) == (whole.length, whole.dtype, whole.shape)
            assert str(number) in part.origin


def test_shared_experts_and_routers_are_no_experts() -> None:
    others = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.gate",
        "block_sparse_moe.gate",
        "mlp.up_proj",
    )
    assert found({f"model.layers.3.{other}.weight": (B, (8, 4)) for other in others}) == {}
    assert found({"experts.0.w1.weight": (B, (8, 4)), "model.experts.gate_up_proj": (B, (2, 8, 4))}) == {}
    assert found({"blk.3.ffn_gate_shexp.weight": (F, (8, 4)), "blk.3.ffn_gate_inp.weight": (F, (8, 4))}) == {}


def test_layers_of_two_stacks_of_layers_have_names_of_their_own() -> None:
    """DeepSeek's prediction of further tokens, beside the layers of the model."""
    main = each("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, layer=0)
    layers = found({**main, **each("mtp.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, layer=0, experts=2)})
    assert numbers(layers) == {"L000": [0, 1, 2, 3], "mtp.L000": [0, 1]}
    adapter = each("base_model.model.model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, layer=0, experts=1)
    layers = found({**adapter, **main})
    assert numbers(layers) == {"L000": [0, 1, 2, 3], "base_model.model.model.layers.mlp.L000": [0]}


def slices_of(tensors: Shapes, origin: str, count: int) -> list[tuple[int, int]]:
    """Offset and length of each slice of a tensor."""
    tensor = next(tensor for tensor in layout(tensors).tensors if tensor.name == origin)
    length = tensor.length // count
    return [(tensor.offset + at * length, length) for at in range(count)]


def part_of(layers: Layers, layer: str, number: int, name: str) -> Component:
    """One tensor of an expert."""
    return next(part for part in layers[layer][number] if part.name == name)


def test_fused_stacks_of_rows_are_split_into_gate_and_up() -> None:
    at = "model.layers.7.mlp.experts"
    tensors = {f"{at}.gate_up_proj": (B, (5, 12, 4)), f"{at}.down_proj": (B, (5, 4, 6))}
    layers = found(tensors)
    assert numbers(layers) == {"L007": [0, 1, 2, 3, 4]}
    for number, (offset, length) in enumerate(slices_of(tensors, f"{at}.gate_up_proj", 5)):
        gate, up = (part_of(layers, "L007", number, name) for name in ("gate_proj", "up_proj"))
        assert (gate.offset, gate.length, gate.shape) == (offset, length // 2, (6, 4))
        assert (up.offset, up.length, up.shape) == (offset + length // 2, length // 2, (6, 4))
    for number, place in enumerate(slices_of(tensors, f"{at}.down_proj", 5)):
        down = part_of(layers, "L007", number, "down_proj")
        assert ((down.offset, down.length), down.shape) == (place, (4, 6))


STACKS: dict[str, tuple[str, Shapes]] = {
    "Llama-4": ("model.layers.1.feed_forward.experts", {"gate_up_proj": (B, (4, 8, 12)), "down_proj": (B, (4, 6, 8))}),
    "gpt-oss": (
        "model.layers.1.mlp.experts",
        {
            "gate_up_proj_blocks": (U8, (4, 12, 2, 16)), "gate_up_proj_scales": (U8, (4, 12, 2)),
            "gate_up_proj_bias": (B, (4, 12)), "down_proj_blocks": (U8, (4, 8, 1, 16)),
            "down_proj_scales": (U8, (4, 8, 1)), "down_proj_bias": (B, (4, 8)),
        },
    ),
    "gpt-oss in full": (
        "model.layers.1.mlp.experts",
        {
            "gate_up_proj": (B, (4, 8, 12)), "gate_up_proj_bias": (B, (4, 12)),
            "down_proj": (B, (4, 6, 8)), "down_proj_bias": (B, (4, 8)),
        },
    ),
    "with scales": (
        "model.layers.1.mlp.experts",
        {
            "gate_up_proj": (F8, (4, 12, 8)), "gate_up_proj_scale_inv": (F, (4, 2, 1)),
            "down_proj": (F8, (4, 8, 6)), "down_proj_scale_inv": (F, (4, 1, 1)),
        },
    ),
    "Granite": (
        "model.layers.1.block_sparse_moe",
        {"input_linear.weight": (B, (4, 12, 8)), "output_linear.weight": (B, (4, 8, 6))},
    ),
    "JetMoE": ("model.layers.1.mlp", {"input_linear.weight": (B, (4, 12, 8)), "output_linear.weight": (B, (4, 8, 6))}),
    "Aria": ("language_model.layers.1.mlp.experts", {"fc1.weight": (B, (4, 8, 12)), "fc2.weight": (B, (4, 6, 8))}),
}  # fmt: skip


@pytest.mark.parametrize("model", STACKS)
def test_other_stacks_stay_slices_under_their_own_names(model: str) -> None:
    """Transposed and interleaved kinds are not split: halves are no runs of bytes, or nobody says which is which."""
    at, parts = STACKS[model]
    tensors = {f"{at}.{part}": shape for part, shape in parts.items()}
    layers = found(tensors)
    assert numbers(layers) == {"L001": [0, 1, 2, 3]}
    for part, (dtype, shape) in parts.items():
        for number, place in enumerate(slices_of(tensors, f"{at}.{part}", 4)):
            component = part_of(layers, "L001", number, part)
            assert ((component.offset, component.length), component.shape) == (place, shape[1:])
            assert (component.dtype, component.origin) == (dtype, f"{at}.{part}[{number}]")


def test_gguf_stacks_are_slices_of_whole_blocks() -> None:
    """Quantised elements have no dtype: an expert's tensor counts the bytes of its rows, and tells the kind."""
    q4 = Tensor("blk.2.ffn_gate_exps.weight", DType.BYTES, (3, 5, 512), 64, 3 * 5 * 2 * 144, dtype_name="Q4_K")
    f32 = Tensor("blk.2.ffn_down_exps.weight", F, (3, 8, 2), 9000, 3 * 8 * 2 * 4, dtype_name="F32")
    bias = Tensor("blk.2.ffn_gate_exps.bias", F, (3, 5), 9900, 3 * 5 * 4, dtype_name="F32")
    layers = recognise([("m-Q4_K.gguf", Layout("gguf", (), (q4, f32, bias)))])
    assert numbers(layers) == {"L002": [0, 1, 2]}
    gate = part_of(layers, "L002", 2, "ffn_gate.weight")
    assert (gate.offset, gate.length, gate.dtype, gate.shape) == (64 + 2 * 1440, 1440, U8, (5, 288))
    assert gate.kind == "Q4_K [5, 512]"
    assert part_of(layers, "L002", 1, "ffn_down.weight").offset == 9000 + 64
    assert part_of(layers, "L002", 1, "ffn_gate.bias").shape == (5,)


def test_dbrx_has_as_many_experts_as_its_router_says() -> None:
    at = "transformer.blocks.4.ffn"
    tensors = {f"{at}.experts.mlp.{part}": (B, (4 * 6, 8)) for part in ("w1", "v1", "w2")}
    layers = found({**tensors, f"{at}.router.layer.weight": (B, (4, 8))})
    assert numbers(layers) == {"L004": [0, 1, 2, 3]}
    part = part_of(layers, "L004", 3, "mlp.v1")
    assert ((part.offset, part.length), part.shape) == (slices_of(tensors, f"{at}.experts.mlp.v1", 4)[3], (6, 8))
    assert found(tensors) == {}
    assert found({**tensors, f"{at}.router.layer.weight": (B, (5, 8))}) == {}


def test_deepspeed_files_are_experts_of_the_layer_and_number_in_their_name() -> None:
    files = []
    for number in range(3):
        inside = f"encoder.layers.6.mlp.deepspeed_moe.experts.deepspeed_experts.{number}"
        tensors = {f"{inside}.fc1.weight": (B, (8, 4)), f"{inside}.fc2.weight": (B, (4, 8))}
        files.append((f"layer_1_expert_{number}_mp_rank_00_model_states.pt", layout(tensors, "torch")))
    layers = recognise(files)
    directory = next(iter(layers))
    assert numbers(layers) == {"L001": [0, 1, 2]}
    assert names(layers, directory, 2) == ["fc1.weight", "fc2.weight"]
    assert {part.file for part in layers[directory][2]} == {files[2][0]}
    second_rank = (files[1][0].replace("rank_00", "rank_01"), files[1][1])
    assert numbers(recognise([*files, second_rank])) == {"L001": [0, 2]}


def test_parts_in_different_files_come_together() -> None:
    gates = each("model.layers.LAYER.mlp.experts.EXPERT.gate_proj.PART", {"weight": (B, (6, 4))})
    downs = each("model.layers.LAYER.mlp.experts.EXPERT.down_proj.PART", {"weight": (B, (4, 6))})
    layers = recognise([("model-00001-of-00002.safetensors", layout(gates)), ("b.safetensors", layout(downs))])
    assert [part.file for part in layers["L003"][1]] == ["b.safetensors", "model-00001-of-00002.safetensors"]


def test_the_same_model_in_another_format_or_file_is_not_mixed_in() -> None:
    tensors = each("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN)
    half = dict(list(tensors.items())[:6])
    files = {
        "pytorch_model.bin": layout(tensors, "torch"),
        "model.safetensors": layout(tensors),
        "model.fp16.safetensors": layout(half),
    }
    layers = recognise(files.items())
    assert {part.file for part in layers["L003"][0]} == {"model.safetensors"}
    del files["model.safetensors"]
    assert numbers(recognise(files.items())) == {"L003": [0, 1]}
    assert recognise([("a.safetensors", layout(tensors)), ("b.safetensors", layout(tensors))]) == {}
    shards = [(f"model-0000{n}-of-00002.safetensors", layout(tensors)) for n in (1, 2)]
    assert recognise([*shards, ("other.safetensors", layout(half))]) == {}
    stacks = {f"model.layers.0.mlp.experts.{part}_proj": (B, (4, 6, 6)) for part in ("up", "down")}
    assert found(stacks)
    assert recognise((file, layout(stacks)) for file, _ in shards) == {}
    ranks = [(f"mp_rank_{rank:02}_model_states.pt", layout(tensors, "torch")) for rank in range(2)]
    assert recognise(ranks) == {}


def test_an_expert_that_lacks_what_others_have_is_left_out() -> None:
    tensors = dict(each("model.layers.LAYER.mlp.experts.EXPERT.PART", DEEPSEEK))
    del tensors["model.layers.3.mlp.experts.1.up_proj.weight_scale_inv"]
    assert numbers(found(tensors)) == {"L003": [0, 2, 3]}
    for name in ("up_proj.weight", "up_proj.weight_scale_inv"):
        del tensors[f"model.layers.3.mlp.experts.2.{name}"]
    assert numbers(found(tensors)) == {"L003": [0, 3]}


def test_a_layer_that_lacks_what_others_have_is_left_out() -> None:
    tensors: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts"
        tensors |= {f"{at}.gate_up_proj": (B, (5, 12, 4)), f"{at}.down_proj": (B, (5, 4, 6))}
    del tensors["model.layers.1.mlp.experts.down_proj"]
    assert list(found(tensors)) == ["L000", "L002"]
    ones = {**each("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, layer=0)}
    ones |= each("model.layers.LAYER.mlp.experts.EXPERT.PART", {"up_proj.weight": QWEN["up_proj.weight"]}, layer=1)
    assert list(found(ones)) == ["L000"]


def test_beside_a_truncated_file_nothing_is_sure() -> None:
    tensors = each("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN)
    files = {"a.safetensors": layout(tensors), "m.pt": layout(tensors, "torch")}
    cut = Layout("safetensors", (), reason="data short by 9 bytes", truncated=True)
    layers = recognise({**files, "b.safetensors": cut}.items())
    assert {part.file for part in layers["L003"][0]} == {"m.pt"}


def test_experts_that_are_not_quantised_stand_beside_those_that_are() -> None:
    tensors = dict(each("model.layers.LAYER.mlp.experts.EXPERT.PART", DEEPSEEK))
    for part in ("gate", "up", "down"):
        tensors[f"model.layers.3.mlp.experts.1.{part}_proj.weight"] = (B, (128, 256))
        del tensors[f"model.layers.3.mlp.experts.1.{part}_proj.weight_scale_inv"]
    layers = found(tensors)
    assert numbers(layers) == {"L003": [0, 1, 2, 3]}
    assert len(layers["L003"][1]) == 3


def test_experts_of_a_directory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        **each("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, layer=0),
        **each("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, layer=1),
    }
    monkeypatch.setattr(limits, "EXPERTS", 8)
    assert len(found(tensors)) == 2
    monkeypatch.setattr(limits, "EXPERTS", 7)
    assert found(tensors) == {}


def test_numbers_may_have_gaps() -> None:
    tensors = each("model.layers.LAYER.mlp.experts.EXPERT.PART", QWEN, experts=30)
    assert numbers(found({name: shape for name, shape in tensors.items() if ".17." in name or ".3." in name}))


@pytest.mark.parametrize(
    "tensors",
    [
        {"gate_up_proj": (B, (4, 12, 8)), "down_proj": (B, (5, 8, 6))},  # 4 or 5 experts
        {"gate_up_proj": (B, (4, 12))},  # no matrices
        {"gate_up_proj": (B, (4, 12, 8)), "down_proj": (B, (4, 8, 6)), "scale": (F, ())},
        {"gate_up_proj": (B, (4, 12, 8)), "0.down_proj.weight": (B, (8, 6))},  # stacks and single ones
        {"gate_up_proj": (B, (0, 12, 8)), "down_proj": (B, (0, 8, 6))},
        {"gate_up_proj": (B, (1 << 40, 0, 8)), "down_proj": (B, (1 << 40, 8, 0))},
        {"gate_up_proj": (B, (limits.EXPERTS + 1, 1, 1)), "down_proj": (B, (limits.EXPERTS + 1, 1, 1))},
    ],
)
def test_stacks_that_are_not_clear_are_left_alone(tensors: Shapes) -> None:
    assert found({f"model.layers.1.mlp.experts.{name}": shape for name, shape in tensors.items()}) == {}


def strided(shape: tuple[int, ...], strides: tuple[int, ...], name: str = "stack") -> Layers:
    """The experts of a stack whose elements lie at these strides, from byte 64 on."""
    length = (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * 4
    tensor = Tensor(f"model.layers.1.mlp.experts.{name}", F, shape, 64, length, strides)
    return recognise([("model.pt", Layout("torch", (), (tensor,)))])


def test_slices_with_gaps_between_them_are_offered_and_others_are_not() -> None:
    layers = strided((3, 4, 2), (20, 2, 1))
    assert [part_of(layers, "L001", number, "stack").offset for number in range(3)] == [64, 144, 224]
    assert part_of(layers, "L001", 2, "stack").length == 32
    assert strided((3, 4, 2), (8, 1, 4)) == {}
    assert strided((3, 4, 2), (2, 6, 1)) == {}
    assert strided((4, 2), (1, 4), "0.w1.weight") == {}


def test_names_that_no_file_can_hold_make_no_expert() -> None:
    for part in ("bad\udc80.weight", "line\nbreak", "__metadata__"):
        assert found({f"model.layers.1.mlp.experts.0.{part}": (F, (2, 2))}) == {}
    assert found({"model.x/y.layers.1.mlp.experts.0.w": (F, (2, 2))}) == {}
    assert found({f"{'v' * 300}.layers.1.mlp.experts.0.w": (F, (2, 2))}) == {}
    many = {f"model.layers.1.mlp.experts.0.w{number}": (F, (1,)) for number in range(limits.EXPERT_PARTS + 1)}
    assert found(many) == {}


def test_the_head_of_an_expert_file_is_read_back() -> None:
    """Names, dtypes and shapes are those of the parts, which are aligned, and where they come from is told."""
    tensors = each("model.layers.LAYER.mlp.experts.EXPERT.PART", DEEPSEEK, experts=1)
    tensors = {**tensors, "model.layers.3.mlp.experts.0.a.odd": (U8, (3,))}
    parts = found(tensors, file="caf\udce9.safetensors")["L003"][0]
    head = header("L003", 0, parts)
    size = len(head) + sum(part.length for part in parts)
    read = parse(BytesSource(head + bytes(size - len(head))))
    assert not read.reason
    assert [(t.name, t.dtype, t.shape, t.length) for t in read.tensors] == [
        (part.name, part.dtype, part.shape, part.length) for part in parts
    ]
    assert all(tensor.offset % (tensor.dtype.bits // 8) == 0 for tensor in read.tensors)
    assert len(head) % 8 == 0
    assert read.metadata["expert"] == "0" and read.metadata["layer"] == "L003"
    origin = "caf\ufffd.safetensors:model.layers.3.mlp.experts.0.gate_proj.weight"
    assert read.metadata["origin:gate_proj.weight"] == origin


WORDS = st.sampled_from(
    ["model", "layers", "3", "0", "mlp", "experts", "gate_up_proj", "down_proj", "w1", "weight", "blk", "ffn_gate_exps",
     "ffn_up", "block_sparse_moe", "input_linear", "output_linear", "router", "layer", "local_experts", "expert_1", "",
     "99999999999", "\udcff", "*", "²"]
)  # fmt: skip
USUAL = st.builds(
    str.replace,
    st.sampled_from(
        ["model.layers.0.mlp.experts.#.weight", "model.layers.0.mlp.experts.gate_up_proj", "blk.1.ffn_up_exps.#",
         "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.1.w#"]
    ),
    st.just("#"),
    st.sampled_from("0123"),
)  # fmt: skip
TENSORS = st.builds(
    Tensor,
    name=st.lists(WORDS, max_size=9).map(".".join) | st.text(max_size=20) | USUAL,
    dtype=st.sampled_from(DType),
    shape=st.lists(st.integers(0, 5) | st.integers(0, 1 << 62), max_size=4).map(tuple),
    offset=st.integers(0, 1 << 40),
    length=st.integers(0, 1 << 40),
    strides=st.none() | st.lists(st.integers(0, 100), max_size=4).map(tuple),
    dtype_name=st.text(max_size=3),
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["model.safetensors", "layer_0_expert_1_mp_rank_00_model_states.pt", "x.gguf"]),
            st.sampled_from(["safetensors", "gguf", "torch", "opaque"]),
            st.lists(TENSORS, max_size=12),
        ),
        max_size=4,
    )
)
def test_nothing_that_a_file_says_raises(files: list[tuple[str, str, list[Tensor]]]) -> None:
    """Whatever is recognised lies inside its tensor, and has a head."""
    for tensors in (tensors for _, _, tensors in files):
        for at, tensor in enumerate(tensors):  # parsers give as many strides as dimensions
            if tensor.strides is not None and len(tensor.strides) != len(tensor.shape):
                tensors[at] = Tensor(tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.length)
    spans = {
        (file, tensor.name): (tensor.offset, tensor.offset + tensor.length)
        for file, _, tensors in files
        for tensor in tensors
    }
    layers = recognise((file, Layout(format_, (), tuple(tensors))) for file, format_, tensors in files)
    for layer, experts in layers.items():
        assert layer and "/" not in layer and not layer.startswith(".")
        for number, parts in experts.items():
            assert header(layer, number, parts)
            for part in parts:
                start, end = spans[part.file, part.origin.partition("[")[0]]
                assert start <= part.offset and part.offset + part.length <= end


@pytest.mark.parametrize("path", [*CORPUS_FILES, *HOSTILE_FILES], ids=lambda path: path.name)
def test_no_file_of_the_corpus_breaks_the_recognition(path: Path) -> None:
    assert isinstance(recognise([(path.name, sniff.parse(BytesSource(path.read_bytes())))]), dict)


_PARTS = st.lists(
    st.builds(
        Component,
        st.text(max_size=9),
        st.sampled_from([F, B, U8]),
        st.lists(st.integers(0, 99), max_size=3).map(tuple),
        st.text(max_size=9) | st.just("mod\udcffel.pt"),
        st.just(0),
        st.just(0),
        st.text(max_size=9),
        st.sampled_from(["", "Q4_K [3, 4]", 'a "kind"']),
    ),
    unique_by=lambda part: part.name,
    max_size=4,
).map(tuple)


@given(st.sampled_from(["L000", "decoder.L012"]), st.integers(0, 10**9 - 1), _PARTS, _PARTS)
def test_the_length_of_a_head_is_known_without_making_it(
    layer: str, number: int, parts: tuple[Component, ...], other: tuple[Component, ...]
) -> None:
    """Also where another expert has the same names and shapes, from elsewhere."""
    moved = tuple(part._replace(file=one.file, origin=one.origin) for part, one in zip(parts, other, strict=False))
    for expert in (parts, moved):
        assert header_length(layer, number, expert) == len(header(layer, number, expert))
