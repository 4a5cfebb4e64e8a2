"""Where tensors of an ONNX file may lie: graphs built with onnx, walked without it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper
from support.packages import write_package

from onnxlm.errors import PackageError
from onnxlm.external_data import ELEMENT_BITS, REACHES_TENSORS, check_external_data
from onnxlm.package import open_package

SIZES = {"model.onnx_data": 64}


def external(name: str = "w", dims: tuple[int, ...] = (2, 4), **entries: str) -> TensorProto:
    """A float tensor of 32 bytes at offset 16, with some of its entries replaced ("-" removes one)."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (
        {"location": "model.onnx_data", "offset": "16", "length": "32"} | entries
    ).items():
        if value != "-":
            tensor.external_data.add(key=key, value=value)
    return tensor


def in_initializer(tensor: TensorProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], "g", [], [], [tensor]))


def in_attribute(tensor: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["y"], value=tensor)
    return helper.make_model(helper.make_graph([node], "g", [], []))


def in_attribute_list(tensor: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Many", [], ["y"], values=[tensor, tensor])
    return helper.make_model(helper.make_graph([node], "g", [], []))


def in_subgraph(tensor: TensorProto) -> onnx.ModelProto:
    branch = helper.make_graph([], "branch", [], [], [tensor])
    inner = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch)], "inner", [], []
    )
    outer = helper.make_node("Many", ["c"], ["y"], bodies=[inner])
    return helper.make_model(helper.make_graph([outer], "g", [], []))


def in_function(tensor: TensorProto) -> onnx.ModelProto:
    node = helper.make_node("Constant", [], ["y"], value=tensor)
    function = helper.make_function("d", "f", [], ["y"], [node], [helper.make_opsetid("", 23)])
    return helper.make_model(helper.make_graph([], "g", [], []), functions=[function])


def in_function_default(tensor: TensorProto) -> onnx.ModelProto:
    model = in_function(TensorProto())
    del model.functions[0].node[:]
    model.functions[0].attribute_proto.append(helper.make_attribute("value", tensor))
    return model


def in_sparse_values(tensor: TensorProto) -> onnx.ModelProto:
    model = in_initializer(TensorProto())
    model.graph.sparse_initializer.add(
        values=tensor, indices=TensorProto(name="i", data_type=7, dims=[0])
    )
    return model


def in_sparse_attribute(tensor: TensorProto) -> onnx.ModelProto:
    model = in_sparse_values(tensor)
    sparse = model.graph.sparse_initializer[0]
    sparse.indices.CopyFrom(tensor)
    model.graph.node.append(helper.make_node("Constant", [], ["y"], sparse_value=sparse))
    del model.graph.sparse_initializer[:]
    return model


def in_training(tensor: TensorProto) -> onnx.ModelProto:
    model = in_initializer(TensorProto())
    model.training_info.add().algorithm.initializer.append(tensor)
    return model


PLACES = [
    in_initializer,
    in_attribute,
    in_attribute_list,
    in_subgraph,
    in_function,
    in_function_default,
    in_sparse_values,
    in_sparse_attribute,
    in_training,
]


def check(model: onnx.ModelProto, folder: Path) -> None:
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    check_external_data(folder / "m.onnx", SIZES)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_a_tensor(
    place: Callable[[TensorProto], onnx.ModelProto], tmp_path: Path
) -> None:
    check(place(external()), tmp_path)
    with pytest.raises(
        PackageError, match=r"m\.onnx: external data of tensor 'w': location; found '\.\./x'"
    ):
        check(place(external(location="../x")), tmp_path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "/etc/passwd"}, "location; found '/etc/passwd'; allowed: model.onnx_data"),
        ({"location": "a/../../x"}, "location; found"),
        ({"location": "config.json"}, "location; found"),
        ({"location": ""}, "location; found ''"),
        ({"location": "-"}, "location; found None"),
        ({"location": "./model.onnx_data"}, "location; found"),
        (
            {"__class__": "x"},
            "found the key '__class__'; allowed: location, offset, length, checksum",
        ),
        ({"offset": "-4"}, "offset; found '-4'; allowed: 0 to 64"),
        ({"offset": "+4"}, "offset"),
        ({"offset": "1_6"}, "offset"),
        ({"offset": "\u0663"}, "offset"),
        ({"offset": str(2**40)}, "offset"),
        ({"offset": "9" * 5000}, "offset"),
        ({"offset": "33"}, "length; found '32'; allowed: 32 bytes, of which 31 are there"),
        ({"length": str(2**50)}, "length"),
        ({"length": "-"}, "length; found None; allowed: 32 bytes"),
        ({"length": "28"}, "length; found '28'; allowed: 32 bytes"),
        ({"length": "36"}, "length"),
    ],
)
def test_hostile_entries(entries: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError) as caught:
        check(in_initializer(external(**entries)), tmp_path)
    assert message in str(caught.value)


def test_a_key_twice(tmp_path: Path) -> None:
    tensor = external()
    tensor.external_data.add(key="location", value="model.onnx_data")
    with pytest.raises(PackageError, match="a key twice"):
        check(in_initializer(tensor), tmp_path)


def test_entries_without_the_flag_and_the_flag_without_entries(tmp_path: Path) -> None:
    tensor = external(location="../x")
    tensor.data_location = TensorProto.DEFAULT
    with pytest.raises(PackageError, match="location"):
        check(in_initializer(tensor), tmp_path)
    tensor = external(location="-", offset="-", length="-")
    with pytest.raises(PackageError, match="location; found None"):
        check(in_initializer(tensor), tmp_path)


@pytest.mark.parametrize("dims", [(-1, 8), (-2, -4), (2**62, 2**62), (3, 3)])
def test_shapes_that_do_not_fit(dims: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="length"):
        check(in_initializer(external(dims=dims)), tmp_path)


def test_offset_and_order_of_entries_are_free(tmp_path: Path) -> None:
    check(in_initializer(external(offset="-")), tmp_path)
    check(
        in_initializer(external(offset="32", checksum="da39a3ee5e6b4b0d3255bfef95601890afd80709")),
        tmp_path,
    )


def test_truncations_and_noise_are_no_models(tmp_path: Path) -> None:
    """A cut between two fields of the model is one without them; any other is refused in one way."""
    data = in_subgraph(external()).SerializeToString()
    for end in range(len(data)):
        (tmp_path / "m.onnx").write_bytes(data[:end])
        try:
            onnx.ModelProto.FromString(data[:end])
            whole = True
        except DecodeError:
            whole = False
        with (
            contextlib.nullcontext()
            if whole
            else pytest.raises(PackageError, match="is no ONNX model")
        ):
            check_external_data(tmp_path / "m.onnx", SIZES)
    for noise in (b"\xff" * 100, b"\x0b", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"):
        (tmp_path / "m.onnx").write_bytes(noise)
        with pytest.raises(PackageError, match="is no ONNX model"):
            check_external_data(tmp_path / "m.onnx", SIZES)


def test_graphs_in_graphs_without_end(tmp_path: Path) -> None:
    graph = helper.make_graph([], "g", [], [], [external(location="../x")])
    for _ in range(20):
        graph = helper.make_graph(
            [helper.make_node("If", [], ["y"], then_branch=graph)], "g", [], []
        )
    with pytest.raises(PackageError, match="nested too deep"):
        check(helper.make_model(graph), tmp_path)


def test_the_walk_covers_the_whole_format() -> None:
    """Every message type through which onnx's own schema reaches a tensor is walked, by the same numbers."""
    messages = {"ModelProto": onnx.ModelProto.DESCRIPTOR}
    pending = [onnx.ModelProto.DESCRIPTOR]
    while pending:
        for field in pending.pop().fields:
            inner = field.message_type
            if inner is not None and inner.name not in messages:
                messages[inner.name] = inner
                pending.append(inner)
    reaching = {"TensorProto"}
    while True:
        more = {
            name
            for name, message in messages.items()
            if any(
                f.message_type is not None and f.message_type.name in reaching
                for f in message.fields
            )
        }
        if more <= reaching:
            break
        reaching |= more
    expected = {
        name: {
            field.number: field.message_type.name
            for field in messages[name].fields
            if field.message_type is not None and field.message_type.name in reaching
        }
        for name in reaching - {"TensorProto"}
    }
    assert expected == REACHES_TENSORS


def test_element_sizes() -> None:
    types = {
        value for name, value in TensorProto.DataType.items() if name not in ("UNDEFINED", "STRING")
    }
    assert types >= ELEMENT_BITS.keys()
    for data_type in types:
        assert ELEMENT_BITS[data_type] == onnx_ir.DataType(data_type).itemsize * 8


def test_half_bytes_are_rounded_up(tmp_path: Path) -> None:
    tensor = external(dims=(3, 3), length="5")
    tensor.data_type = TensorProto.UINT4
    check(in_initializer(tensor), tmp_path)


def test_real_files_pass(tmp_path: Path) -> None:
    """What onnx itself writes as external data is accepted."""
    weights = [helper.make_tensor(f"w{i}", 1, [3, 5], bytes(60), raw=True) for i in range(3)]
    model = helper.make_model(helper.make_graph([], "g", [], [], weights))
    onnx.save_model(
        model,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=0,
    )
    size = (tmp_path / "model.onnx_data").stat().st_size
    check_external_data(tmp_path / "m.onnx", {"model.onnx_data": size})
    with pytest.raises(PackageError, match="length"):
        check_external_data(tmp_path / "m.onnx", {"model.onnx_data": size - 1})


def test_a_package_with_a_hostile_graph_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXLM_CACHE", str(tmp_path / "cache"))
    hostile = in_attribute(external(location="config.json", offset="0")).SerializeToString()
    monkeypatch.setattr("support.packages.EMPTY_MODEL", hostile)
    write_package(tmp_path / "model")
    for verify in ("auto", "auto", "always", "never"):
        with pytest.raises(
            PackageError, match=r"decode\.onnx: external data of tensor 'w': location"
        ):
            open_package(tmp_path / "model", verify=verify)


def test_a_large_graph_takes_little_time(tmp_path: Path) -> None:
    """Far above any machine's noise: the walk must not be quadratic or copy what it skips."""
    tensors = [external(f"model.layers.{i}.weight") for i in range(500)]
    nodes = [
        helper.make_node(
            "MatMulNBits", [f"a{i}", t.name], [f"a{i + 1}"], K=4096, N=4096, doc_string="x" * 2000
        )
        for i, t in enumerate(tensors)
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], [], tensors))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        check_external_data(tmp_path / "m.onnx", SIZES)
        best = min(best, time.perf_counter() - began)
    assert best < 0.5
