"""The reader of opcodes, beside pickle itself, and the programs that a pickle can be."""

from __future__ import annotations

import collections
import math
import pickle
import struct
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.pickle_names import _join, read_tensors
from moonclipfs.formats.pickle_reader import UNKNOWN, Global, Node, Pairs, PickleReader, Value
from moonclipfs.formats.window import Window
from moonclipfs.types import BytesSource
from tests.formats.samples import Opcodes


def read(data: bytes) -> Value:
    return PickleReader(Window(BytesSource(data), 0, len(data))).read()


def expected(value: Any) -> Value:
    """Return what the reader makes of a plain value."""
    if isinstance(value, dict):
        return Pairs((expected(key), expected(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(expected(item) for item in value)
    if isinstance(value, (float, bytes, frozenset, set)):
        return UNKNOWN
    return UNKNOWN if isinstance(value, int) and value.bit_length() > 127 else value


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_read_as_pickle_writes_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if protocol == 2 and any(isinstance(leaf, bytes) for leaf in leaves(value)):
        read(data)  # protocol 2 has no bytes, and writes a call in their place
    else:
        assert read(data) == expected(value)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for pair in value.items() for part in pair for leaf in leaves(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_calls_and_objects_are_nodes(protocol: int) -> None:
    class_of = Global(Point.__module__, "Point")
    point = read(pickle.dumps(Point(1), protocol))
    assert isinstance(point, Node) and point.state == Pairs([("x", 1)])
    assert point.function == class_of or (isinstance(point.arguments, tuple) and point.arguments[0] == class_of)
    ordered = read(pickle.dumps(collections.OrderedDict(a=1), protocol))
    assert (
        isinstance(ordered, Node)
        and ordered.pairs == [("a", 1)]
        and ordered.function == Global("collections", "OrderedDict")
    )
    assert read(pickle.dumps([{1}, frozenset({2}), bytearray(b"x"), math.inf], protocol))


def test_every_opcode_that_checkpoints_may_use() -> None:
    assert read(b"\x80\x02(K\x01K\x02d.") == Pairs([(1, 2)])
    assert read(b"\x80\x02NN0.") is None
    assert read(b"\x80\x02N(N0N1.") is None
    assert read(b"\x80\x02(K\x01l2\x86.") == ([1], [1])
    assert read(b"\x80\x02\x8b\x11\0\0\0" + bytes(17) + b".") is UNKNOWN
    made = read(b"\x80\x02ca\nb\n)}\x92N\x85}X\x01\0\0\0sK\x07s\x86b(K\x01K\x02eK\x03a.")
    assert isinstance(made, Node) and made.items == [1, 2, 3] and made.function == Global("a", "b")


def test_tensors_in_slots_and_in_attributes() -> None:
    for state in (b"N}X\x01\0\0\0s%ss\x86", b"}X\x01\0\0\0s%ss", b"]%sa"):
        tensor = Opcodes().tensor("0", 1, (1,), (1,)).data[2:]
        assert tensors(b"\x80\x02}X\x01\0\0\0oca\nb\n)\x81" + state % tensor + b"bs.") in (["o.s"], ["o.state.0"])


def test_the_number_of_tensors_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSORS", 10)
    tensor = Opcodes().op(b"]").tensor("0", 1, (1,), (1,)).op(b"q\x00a(")
    assert len(tensors(tensor.op(b"h\x00" * 9 + b"e").done())) == 10
    with pytest.raises(ParseError, match="more than 10 tensors"):
        tensors(tensor.op(b"(h\x00e").done())


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "short by"),
        (b"\x80\x02", "short by"),
        (b"\x80\x02.", "stack is empty"),
        (b"\x80\x02b.", "stack is empty"),
        (b"\x80\x02Nb.", "stack is empty"),
        (b"\x80\x02t.", "mark is missing"),
        (b"\x80\x02(0.", "stack is empty"),
        (b"\x80\x02h\x07.", "memo 7 is missing"),
        (b"\x80\x02}(Nu.", "without a value"),
        (b"\x80\x02NN\x93.", "something else than text"),
        (b"\x80\x02X\xff\xff\xff\x7f.", "short by|announced"),
        (b"\x80\x02\x8d" + b"\xff" * 8 + b".", "short by|announced"),
        (b"\x80\x02ca\n" + b"x" * 5000 + b"\n.", "no line end"),
        (b"\x80\x02ca.", "short by"),
        (b"c__builtin__\neval\nI1\n.", "opcode 0x49"),
    ],
)
def test_a_broken_pickle_is_an_error(data: bytes, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        read(data)


@pytest.mark.parametrize(
    "opcode", [b"]", b"}", b"(", b"]q\x00", b"(t", b"N\x85", b"X\0\0\0\0", b"ca\nb\n", b"ca\nb\n)R"]
)
def test_what_takes_memory_is_counted(opcode: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PICKLE_OBJECTS", 1000)
    read(b"\x80\x02N" + opcode * 300 + b"N.")
    with pytest.raises(ParseError, match="more than 1000 objects"):
        read(b"\x80\x02N" + opcode * 1100 + b"N.")


def test_opcodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PICKLE_OPCODES", 100)
    with pytest.raises(ParseError, match="more than 100 opcodes"):
        read(b"N" * 200 + b".")


def test_long_strings_are_passed_over() -> None:
    length = limits.PICKLE_STRING_BYTES + 1
    assert read(b"X" + struct.pack("<I", length) + bytes(length) + b".") is UNKNOWN


def tensors(data: bytes) -> list[str]:
    return [named.name for named in read_tensors(Window(BytesSource(data), 0, len(data))).tensors]


def test_a_container_that_holds_itself_ends() -> None:
    program = Opcodes().op(b"}q\x00").text("self").op(b"h\x00s").text("w").tensor("0", 1, (1,), (1,)).op(b"s")
    assert tensors(program.done()) == ["w"]


def test_a_pickle_that_doubles_itself_is_walked_once() -> None:
    program = Opcodes().op(b"]q\x00").tensor("0", 1, (1,), (1,)).op(b"a")
    for number in range(200):
        program.op(b"]q" + bytes([number + 1])).op(b"(h%ch%ce" % (number, number))
    assert tensors(program.done()) == [".".join(["0"] * 201)]


V2 = b"ctorch._utils\n_rebuild_tensor_v2\n"
FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n"
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0aNK\x01tQ"


@pytest.mark.parametrize(
    ("first", "grow", "last", "use"),
    [
        (FROM_TYPE + b"q\x00)q\x01", b"h\x00h\x00h\x01\x87q\x01", b"", b"h\x00h\x01R"),
        (V2 + b"q\x00(" + STORAGE + b"K\x00(", b"K\x01", b"t2tq\x01", b"h\x00h\x01R"),
        (b"ca\nb\nq\x00(", b"]", b"tq\x01", b"h\x00h\x01R"),
        (b"ca\nb\nq\x00}(", b"N]", b"uq\x01", b"h\x00)\x81h\x01b"),
        (b"ca\nb\nq\x00N}(", b"N]", b"u\x86q\x01", b"h\x00)\x81h\x01b"),
        (b"ccollections\nOrderedDict\nq\x00](", b"N]\x86", b"e\x85q\x01", b"h\x00h\x01R"),
        (b"ccollections\nOrderedDict\nq\x00](", b"N]\x86", b"eq\x01", b"h\x00h\x01\x85R"),
        (b"](", b"]", b"eq\x01", b"h\x01"),
    ],
    ids=[
        "calls in calls", "long shapes", "arguments", "states", "slots", "ordered dicts", "pairs of ordered dicts",
        "lists",
    ],
)  # fmt: skip
def test_the_work_grows_as_the_pickle_does(first: bytes, grow: bytes, last: bytes, use: bytes) -> None:
    """What is long and shared is not walked again at each use."""
    one, two = (work(b"\x80\x02(" + first + grow * n + last + use * n + b"l.") for n in (200, 400))
    assert one < two < 2.2 * one


def work(data: bytes) -> int:
    """Lines and calls of Python that reading the tensors of a pickle takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        tensors(data)
    finally:
        sys.settrace(before)
    return count


class CountedText(str):
    """A key that tells when it is made part of another string."""

    joined = 0

    def __format__(self, spec: str) -> str:
        CountedText.joined += 1
        return super().__format__(spec)


def test_a_long_key_is_not_joined_to_a_path_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedText, "joined", 0)
    assert _join("path", CountedText("key")) == "path.key"
    assert CountedText.joined == 1
    assert _join("path", CountedText("k" * limits.TENSOR_NAME_BYTES)) is None
    assert CountedText.joined == 1


@pytest.mark.parametrize(("path", "spare"), [("", 0), ("p", 2), ("a.b", 4)])
def test_names_are_as_long_as_the_limit(path: str, spare: int) -> None:
    longest = "k" * (limits.TENSOR_NAME_BYTES - spare)
    joined = _join(path, longest)
    assert joined is not None and len(joined) == limits.TENSOR_NAME_BYTES
    assert _join(path, longest + "k") is None
    assert _join(path, "_modules") == path


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        (b"]", b"a"),
        (b"", b"\x85"),
        (b"ca\nb\n)\x81", b"b"),
        (b"ca\nb\n", b"\x85R"),
        (b"}X\x08\0\0\0_modules", b"s"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nN", b"NtR"),
    ],
)
def test_depth_needs_no_recursion(opening: bytes, closing: bytes) -> None:
    assert tensors(b"\x80\x02" + opening * 50_000 + b"N" + closing * 50_000 + b".") == []


def test_wrong_arguments_of_torch_functions_make_no_tensor() -> None:
    def rebuilt(arguments: bytes, name: str = "_rebuild_tensor_v2") -> bytes:
        return Opcodes().op(b"]").name("torch._utils", name).op(arguments).op(b"Ra").done()

    storage = (
        b"(" + Opcodes().text("storage").name("torch", "FloatStorage").text("0").text("cpu").number(1).data[2:] + b"tQ"
    )
    good = storage + b"K\x00K\x01\x85K\x01\x85"
    assert tensors(rebuilt(b"(" + good + b"t")) == ["0"]
    wrong = [b")", b"N", b"(NK\x00))t", b"(" + storage + b"NNNt", b"(" + storage + b"K\x00K\x01\x85)t"]
    wrong += [b"(" + storage + b"J\xff\xff\xff\xff))t", b"(" + storage + b"K\x00\x88\x85K\x01\x85t"]
    wrong += [b"(" + storage + b"K\x00(" + b"K\x01" * 33 + b"t(" + b"K\x01" * 33 + b"tt"]
    for arguments in wrong:
        assert tensors(rebuilt(arguments)) == [], arguments
    for name in ("_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_tensor_v3", "_rebuild_qtensor"):
        assert tensors(rebuilt(b")", name)) == tensors(rebuilt(b"N", name)) == []
    for identifier in (b"N", b")", b"(NNt", b"X\x01\0\0\0a", b"(X\x07\0\0\0storageNNNNt"):
        assert tensors(Opcodes().op(b"]").op(identifier + b"Qa").done()) == []


def test_ordered_dicts_of_python_2() -> None:
    program = (
        Opcodes().name("collections", "OrderedDict").op(b"(](](").text("w").tensor("0", 1, (1,), (1,)).op(b"eN]etR")
    )
    assert tensors(program.done()) == ["w"]
