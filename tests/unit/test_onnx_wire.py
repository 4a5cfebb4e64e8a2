"""Moving tensors in a serialized model, judged by what the onnx package reads from the result."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnxlm.runtime.onnx_wire import Entries, move_tensors

OLD = [("location", "old.bin"), ("offset", "128"), ("length", "32")]


def tensor(name: str, entries: Entries | None = None) -> TensorProto:
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=(2, 4), doc_string="kept")
    if entries is None:
        made.raw_data = bytes(range(32))
        return made
    made.data_location = TensorProto.EXTERNAL
    for key, value in entries:
        made.external_data.add(key=key, value=value)
    return made


def model_everywhere(entries: Entries) -> onnx.ModelProto:
    """Tensors as initializer, attribute, in a subgraph, a sparse tensor and a function, and one inside."""
    sparse = onnx.SparseTensorProto(values=tensor("values", entries), dims=[8])
    branch = helper.make_graph([], "branch", [], [], [tensor("branch", entries)])
    nodes = [
        helper.make_node("Constant", [], ["a"], value=tensor("attribute", entries)),
        helper.make_node("If", ["c"], ["b"], then_branch=branch, else_branch=branch),
    ]
    graph = helper.make_graph(
        nodes, "g", [], [], [tensor("initializer", entries), tensor("inside")]
    )
    graph.sparse_initializer.append(sparse)
    body = helper.make_node("Constant", [], ["y"], value=tensor("function", entries))
    function = helper.make_function("d", "f", [], ["y"], [body], [helper.make_opsetid("", 23)])
    model = helper.make_model(graph, functions=[function])
    model.metadata_props.add(key="author", value="x" * 300)
    return model


def walk(message: object) -> Iterator[TensorProto]:
    """Every tensor of a protobuf message, whatever holds it."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from walk(part)


def entries_of(model: onnx.ModelProto) -> dict[str, Entries]:
    return {t.name: [(e.key, e.value) for e in t.external_data] for t in walk(model)}


@pytest.mark.parametrize(
    "new",
    [
        [("location", "new.bin"), ("offset", "4096"), ("length", "32")],
        [
            ("location", "n"),
            ("prepacked_0", "MatMul+" + "9" * 20 + "|1;2;0" * 50),
        ],  # a longer message
        [("location", "ü" * 100)],
    ],
)
def test_tensors_move_wherever_they_are(new: Entries) -> None:
    seen: list[Entries] = []

    def move(entries: Entries) -> Entries:
        seen.append(entries)
        return new

    moved = onnx.load_from_string(move_tensors(model_everywhere(OLD).SerializeToString(), move))
    names = {"initializer", "attribute", "branch", "values", "function"}
    assert entries_of(moved) == dict.fromkeys(names, new) | {"inside": []}
    assert seen == [OLD] * 6  # both branches of the If
    # Nothing else has changed.
    assert moved == model_everywhere(new)


@given(
    st.lists(st.tuples(st.text(max_size=200), st.text(max_size=200)), min_size=1, max_size=4),
    st.lists(st.tuples(st.text(max_size=200), st.text(max_size=200)), max_size=4),
)
def test_any_entries_are_read_and_written(old: Entries, new: Entries) -> None:
    seen: list[Entries] = []

    def move(entries: Entries) -> Entries:
        seen.append(entries)
        return new

    graph = helper.make_graph([], "g", [], [], [tensor("t", old)])
    moved = move_tensors(helper.make_model(graph).SerializeToString(), move)
    assert seen == [old]
    assert entries_of(onnx.load_from_string(moved)) == {"t": new}


def test_a_model_without_external_tensors_stays_as_it_is() -> None:
    model = helper.make_model(helper.make_graph([], "g", [], [], [tensor("inside")]))
    data = model.SerializeToString()
    assert move_tensors(data, lambda entries: pytest.fail("nothing lies outside")) == data


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_damaged_model_is_refused(cut: int) -> None:
    data = model_everywhere(OLD).SerializeToString()
    with pytest.raises(ValueError, match="cut short"):
        move_tensors(data[:-cut], lambda entries: entries)
