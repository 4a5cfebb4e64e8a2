"""A profile: events by hand, and a real one whose parts add up to what the loop saw."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.runtime_models import HOT_CONFIG, HOT_CONTEXT, hot_package

from onnxlm.cli.profile_page import profile_page
from onnxlm.errors import InputError
from onnxlm.runtime.bench import Case
from onnxlm.runtime.graph_cost import NodeCost
from onnxlm.runtime.profile_events import Cell, read_calls
from onnxlm.runtime.profile_report import Phase, Profile, Slice, place_order
from onnxlm.runtime.profile_run import profile
from onnxlm.runtime.session import SessionConfig

COSTS = {
    "up": NodeCost("MatMul", "layer 0", 1000, 50),
    "down": NodeCost("MatMul", "layer 0", 500, 25),
    "last": NodeCost("MatMul", "head", 100, 10),
}


def event(name: str, ts: int, dur: int, op_type: str | None = None) -> dict[str, object]:
    if op_type is None:
        return {"cat": "Session", "name": name, "ts": ts, "dur": dur, "args": {}}
    args = {"op_name": op_type}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": args}


EVENTS = [
    event("session_initialization", 0, 900),
    # A call that warms up, then two.
    *(event("up", 1000, 9000, "MatMul"), event("model_run", 1000, 9999)),
    *(event("up", 20000, 300, "MatMul"), event("down", 20400, 100, "MatMul")),
    *(event("last", 20600, 200, "MatMul"), event("copy", 20900, 50, "Memcpy")),
    event("model_run", 20000, 1000),
    *(event("up", 30000, 500, "MatMul"), event("down", 30600, 300, "MatMul")),
    *(event("last", 31000, 400, "MatMul"), event("copy", 31500, 150, "Memcpy")),
    event("model_run", 30000, 2000),
]


def test_events_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(EVENTS), encoding="utf-8")
    found = read_calls(file, COSTS, skip=1, batch=2, tokens=8)
    assert found.session_ms == pytest.approx(1.5)
    cells = {(cell.op_type, cell.place): cell for cell in found.cells}
    assert cells.keys() == {("MatMul", "layer 0"), ("MatMul", "head"), ("Memcpy", "elsewhere")}
    layer = cells["MatMul", "layer 0"]
    assert (layer.nodes, layer.weight_bytes) == (2, 1500)
    assert layer.ms == pytest.approx((0.3 + 0.1 + 0.5 + 0.3) / 2)
    assert layer.flops == 16 * 75
    assert cells["MatMul", "head"].flops == 2 * 10  # the last token of each row
    assert cells["Memcpy", "elsewhere"].ms == pytest.approx(0.1)


CELLS = (
    Cell("MatMul", "layer 10", 2, 2.0, 4_000_000, 1000),
    Cell("MatMul", "layer 9", 2, 1.0, 1_000_000, 1000),
    Cell("Relu", "layer 9", 1, 0.5, 0, 0),
)
PHASE = Phase("decode", 8, 5.0, 4.5, 4.0, CELLS, bytes_per_s=1e10, flops_per_s=1e9)


def test_parts_of_a_phase_by_hand() -> None:
    assert PHASE.operators() == [
        # 5 MB at 10 GB/s are half a millisecond, of three.
        Slice("MatMul", 4, 3.0, 0.6, pytest.approx(1 / 6)),
        Slice("Relu", 1, 0.5, 0.1, None),
        Slice("between operators", 0, 0.5, 0.1, None),
        Slice("outside the session", 0, 1.0, 0.2, None),
    ]
    assert [(part.name, part.ms) for part in PHASE.places()] == [
        ("layer 9", 1.5),
        ("layer 10", 2.0),
    ]


def test_places_in_their_order() -> None:
    names = ["head", "elsewhere", "layer 10", "layer 2", "embedding"]
    ordered = ["embedding", "layer 2", "layer 10", "head", "elsewhere"]
    assert sorted(names, key=place_order) == ordered


@pytest.fixture(scope="module")
def found() -> Profile:
    """The hot model's profile."""
    return profile(hot_package(), SessionConfig(threads=1), Case(48, 9, batch=2), repeats=3)


def test_parts_add_up_to_what_the_loop_saw(found: Profile) -> None:
    for phase in found.phases:
        assert sum(part.ms for part in phase.operators()) == pytest.approx(phase.wall_ms)
        assert sum(part.share for part in phase.operators()) == pytest.approx(1.0)
        inside = sum(part.ms for part in phase.places())
        # Operators lie inside the session's time, and that inside the loop's: rounding to microseconds apart.
        assert 0 < inside <= phase.session_ms * 1.05
        assert phase.session_ms <= phase.wall_ms * 1.05
        assert all(part.ms >= 0 for part in phase.places())


def test_calls_and_layers(found: Profile) -> None:
    prefill, decode = found.phases
    assert (prefill.calls, decode.calls) == (3, 3 * 8)
    layers = [f"layer {i}" for i in range(HOT_CONFIG["num_hidden_layers"])]
    for phase in found.phases:
        assert [part.name for part in phase.places()] == ["embedding", *layers, "head"]
        attention = {part.name: part.nodes for part in phase.operators()}["GroupQueryAttention"]
        assert attention == len(layers)


def test_only_what_has_weights_has_a_roofline(found: Profile) -> None:
    for phase in found.phases:
        parts = {part.name: part.of_roofline for part in phase.operators()}
        assert (parts["FusedMatMul"] or 0) > 0
        assert parts["Split"] is None


def test_a_profile_as_json(found: Profile) -> None:
    value = json.loads(found.to_json())
    assert value["schema"] == "onnxlm.profile/1"
    for phase in value["phases"]:
        parts = sum(part["ms"] for part in phase["operators"])
        assert parts == pytest.approx(phase["wall_ms"])
        assert {"cells", "places", "plain_ms", "session_ms"} <= phase.keys()


def test_a_profile_as_a_page(found: Profile) -> None:
    text = profile_page(found)
    for title in ("Prefill of a prompt", "A decode step", "A decode step, by layer", "By layer"):
        assert f"<h2>{title}</h2>" in text
    assert "http" not in text
    assert "milliseconds a call" in text


def test_a_profile_as_tables(found: Profile) -> None:
    prefill, decode, places = found.tables()
    assert prefill.rows[-1][0] == "total"
    assert prefill.rows[-1][3] == "100.0%"
    assert decode.header == ("operator", "nodes", "ms", "share", "of roof")
    assert len(places.rows[0]) == len(places.header) == 7


def test_the_longest_prompt_of_a_batch_is_one_call() -> None:
    case = Case(128, 2, batch=16)
    made = profile(hot_package(), SessionConfig(threads=1), case, repeats=2)
    prefill, _ = made.phases
    layers = HOT_CONFIG["num_hidden_layers"]
    assert prefill.calls == 2
    assert {p.name: p.nodes for p in prefill.operators()}["GroupQueryAttention"] == layers
    assert sum(part.ms for part in prefill.operators()) == pytest.approx(prefill.wall_ms)
    assert all(part.ms >= 0 for part in prefill.operators())


def test_a_fallback_is_a_note(found: Profile) -> None:
    assert not any("fell back" in line for line in found.notes())
    fallen = dataclasses.replace(found, fallback="no device")
    assert fallen.notes()[0] == "fell back: no device"
    assert "fell back: no device" in profile_page(fallen)


def test_keys_and_values_over_their_budget_are_refused() -> None:
    with pytest.raises(InputError, match="--kv-budget"):
        profile(hot_package(), SessionConfig(threads=1), Case(48, 9), repeats=1, kv_budget=1000)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(257, 8), "--prompt-tokens; found 257; allowed: up to 256"),
        (Case(8, 1), "--new-tokens; found 1; allowed: 2 or more"),
        # 2,048 tokens run in one call, of all rows together.
        (
            Case(129, 8, batch=16),
            "--prompt-tokens; found 129; allowed: up to 128, what one call of the prefill graph runs at "
            "a batch of 16",
        ),
        (Case(500, 200), f"do not fit the context; found 700; allowed: up to {HOT_CONTEXT}"),
    ],
)
def test_cases_that_make_no_profile(case: Case, message: str) -> None:
    with pytest.raises(InputError) as raised:
        profile(hot_package(), SessionConfig(threads=1), case, repeats=1)
    assert message in str(raised.value)
