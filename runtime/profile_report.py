"""A profile: time by operator type, by layer and by phase, beside what the machine allows at the least."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from onnxlm.runtime.bench_tables import Table, number, percent
from onnxlm.runtime.graph_cost import EMBEDDING, HEAD
from onnxlm.runtime.machine import Machine
from onnxlm.runtime.profile_events import Cell

SCHEMA = "onnxlm.profile/1"
BETWEEN, OUTSIDE = "between operators", "outside the session"


@dataclass(frozen=True)
class Slice:
    """A part of a phase.

    Attributes:
        name: An operator type, or a place.
        nodes: Operators in a call.
        ms: Their time in a call.
        share: Of the phase's wall time.
        of_roofline: Least time for their weights and products at the machine's rates, by their time; None
            where they have no weights or the rates do not hold.
    """

    name: str
    nodes: int
    ms: float
    share: float
    of_roofline: float | None


@dataclass(frozen=True)
class Phase:
    """Prefill, or a decode step.

    Attributes:
        name: "prefill" or "decode".
        calls: That the times are means of.
        wall_ms: Of a call, as the token loop sees it, the profiler at work.
        plain_ms: The same without the profiler.
        session_ms: The part of it inside ONNX Runtime's session.
        cells: Where that part went.
        bytes_per_s: The machine's rate of reading memory; None where it bounds nothing.
        flops_per_s: Its rate of multiplying.
    """

    name: str
    calls: int
    wall_ms: float
    plain_ms: float
    session_ms: float
    cells: tuple[Cell, ...]
    bytes_per_s: float | None
    flops_per_s: float | None

    def operators(self) -> list[Slice]:
        """By operator type, the longest first, then what is no operator: together the wall time."""
        slices = self._group(lambda cell: cell.op_type)
        slices.sort(key=lambda part: -part.ms)
        inside = sum(cell.ms for cell in self.cells)
        rest = ((BETWEEN, self.session_ms - inside), (OUTSIDE, self.wall_ms - self.session_ms))
        slices += (Slice(name, 0, ms, ms / self.wall_ms, None) for name, ms in rest)
        return slices

    def places(self) -> list[Slice]:
        """By place, from the embedding to the head."""
        return sorted(self._group(lambda cell: cell.place), key=lambda part: place_order(part.name))

    def _group(self, key: Callable[[Cell], str]) -> list[Slice]:
        groups: dict[str, list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(key(cell), []).append(cell)
        return [self._slice(name, cells) for name, cells in groups.items()]

    def _slice(self, name: str, cells: Iterable[Cell]) -> Slice:
        cells = list(cells)
        ms = sum(cell.ms for cell in cells)
        size, flops = sum(c.weight_bytes for c in cells), sum(c.flops for c in cells)
        share = None
        if self.bytes_per_s and self.flops_per_s and flops and ms:
            share = 1000 * max(size / self.bytes_per_s, flops / self.flops_per_s) / ms
        return Slice(name, sum(c.nodes for c in cells), ms, ms / self.wall_ms, share)


@dataclass(frozen=True)
class Profile:
    """A package's profile.

    Attributes:
        package: The folder.
        precision: Of its weights.
        provider: ONNX Runtime's name of what ran.
        threads: Threads inside an operator.
        batch: Rows.
        prompt_tokens: Length of the prompts.
        new_tokens: Tokens generated behind each.
        repeats: Runs that count.
        machine: What it ran on.
        phases: "prefill" and "decode".
        fallback: Why it did not, or not wholly, run on the provider asked for; None when it did.
        schema: Name and version of this form.
    """

    package: str
    precision: str
    provider: str
    threads: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    machine: Machine
    phases: tuple[Phase, ...]
    fallback: str | None = None
    schema: str = SCHEMA

    def to_json(self) -> str:
        """One JSON object: the fields, and the sums by operator type and place."""
        value = dataclasses.asdict(self)
        for phase, fields in zip(self.phases, value["phases"], strict=True):
            fields["operators"] = [dataclasses.asdict(part) for part in phase.operators()]
            fields["places"] = [dataclasses.asdict(part) for part in phase.places()]
        return json.dumps(value, indent=2, ensure_ascii=False)

    def summary(self) -> str:
        """One line on what ran."""
        return (
            f"{self.package}: {self.precision} on {self.provider}, {self.threads} threads; "
            f"prompt {self.prompt_tokens}, {self.new_tokens} new tokens, batch {self.batch}, "
            f"means of {self.repeats} runs"
        )

    def notes(self) -> list[str]:
        """What ran elsewhere than asked for, and what the profiler itself costs, a line a phase."""
        fell = [] if self.fallback is None else [f"fell back: {self.fallback}"]
        return fell + [
            f"{phase.name}: {number(phase.plain_ms)} ms without the profiler, "
            f"{number(phase.wall_ms)} ms with it"
            for phase in self.phases
        ]

    def tables(self) -> list[Table]:
        """A table of operator types a phase, and one of places."""
        tables = [_operator_table(phase) for phase in self.phases]
        return [*tables, self._place_table()]

    def _place_table(self) -> Table:
        found = [{part.name: part for part in phase.places()} for phase in self.phases]
        names = sorted({name for parts in found for name in parts}, key=place_order)
        header = ["place"]
        for phase in self.phases:
            header += [f"{phase.name} ms", "share", "of roof"]
        rows = []
        for name in names:
            cells = [name]
            for parts in found:
                cells += _part_cells(parts, name)
            rows.append(tuple(cells))
        return Table("By layer", tuple(header), tuple(rows), left=1)


def _part_cells(parts: Mapping[str, Slice], name: str) -> tuple[str, str, str]:
    part = parts.get(name)
    if part is None:
        return "-", "-", "-"
    return number(part.ms), f"{part.share:.1%}", percent(part.of_roofline)


def _operator_table(phase: Phase) -> Table:
    rows = [
        (
            part.name,
            str(part.nodes) if part.nodes else "",
            number(part.ms),
            f"{part.share:.1%}",
            percent(part.of_roofline),
        )
        for part in phase.operators()
    ]
    rows.append(("total", "", number(phase.wall_ms), "100.0%", ""))
    title = {"prefill": "Prefill of a prompt", "decode": "A decode step"}[phase.name]
    return Table(title, ("operator", "nodes", "ms", "share", "of roof"), tuple(rows), left=1)


def place_order(name: str) -> tuple[int, int]:
    """From the embedding through the layers to the head, then what is nowhere."""
    layer = re.fullmatch(r"layer (\d+)", name)
    if layer:
        return 1, int(layer[1])
    return {EMBEDDING: 0, HEAD: 2}.get(name, 3), 0
