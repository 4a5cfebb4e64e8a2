"""ONNX Runtime's profile of a session -> time by operator type and place, for each of its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxlm.runtime.graph_cost import NodeCost, node_flops

ELSEWHERE = "elsewhere"
_KERNEL = "_kernel_time"
_CALL = "model_run"


@dataclass(frozen=True)
class Cell:
    """Operators of one type at one place, in one call.

    Attributes:
        op_type: As ONNX Runtime ran it.
        place: "embedding", "layer 0" and so on, "head", or "elsewhere" for what no graph names.
        nodes: How many.
        ms: Time of all of them, mean over the calls.
        weight_bytes: Weights that they read.
        flops: Multiplications and additions by weights.
    """

    op_type: str
    place: str
    nodes: int
    ms: float
    weight_bytes: int
    flops: int


@dataclass(frozen=True)
class Calls:
    """What a session's profile says of some of its calls.

    Attributes:
        session_ms: From the beginning to the end of a call, mean.
        cells: Where that went, by operator type and place; what is missing lies between operators.
    """

    session_ms: float
    cells: tuple[Cell, ...]


def read_calls(
    file: Path, costs: Mapping[str, NodeCost], skip: int, batch: int, tokens: int
) -> Calls:
    """Means over the calls of a profile.

    Args:
        file: What `end_profiling` wrote.
        costs: Of the graph's nodes, by name.
        skip: Calls at the beginning that warm up.
        batch: B.
        tokens: S of each call.
    """
    events = json.loads(file.read_text(encoding="utf-8"))
    calls = sorted((e for e in events if e["name"] == _CALL), key=lambda e: float(e["ts"]))[skip:]
    begin = float(calls[0]["ts"])
    nodes = [
        event
        for event in events
        if event["cat"] == "Node" and event["name"].endswith(_KERNEL) and event["ts"] >= begin
    ]
    return Calls(
        session_ms=sum(call["dur"] for call in calls) / 1000 / len(calls),
        cells=tuple(_cells(nodes, costs, len(calls), batch, tokens)),
    )


def _cells(
    events: Sequence[Mapping[str, Any]],
    costs: Mapping[str, NodeCost],
    calls: int,
    batch: int,
    tokens: int,
) -> list[Cell]:
    micros: dict[str, list[float]] = {}
    types: dict[str, str] = {}
    for event in events:
        name = event["name"].removesuffix(_KERNEL)
        micros.setdefault(name, []).append(float(event["dur"]))
        types[name] = event["args"]["op_name"]
    cells: dict[tuple[str, str], Cell] = {}
    for name, durations in micros.items():
        cost = costs.get(name, NodeCost(types[name], ELSEWHERE))
        key = (types[name], cost.place)
        before = cells.get(key, Cell(*key, 0, 0.0, 0, 0))
        cells[key] = Cell(
            *key,
            nodes=before.nodes + 1,
            ms=before.ms + sum(durations) / 1000 / calls,
            weight_bytes=before.weight_bytes + cost.weight_bytes,
            flops=before.flops + node_flops(cost, batch, tokens),
        )
    return list(cells.values())
