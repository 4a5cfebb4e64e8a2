"""Which execution provider runs which nodes of a graph, by ONNX Runtime's own account."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.io_spec import TensorSpec
from onnxlm.package import Package
from onnxlm.runtime.opening import check_runs
from onnxlm.runtime.session import (
    SessionConfig,
    assigned_nodes,
    open_session,
    run_error,
    session_options,
)

Counts = Mapping[str, Mapping[str, int]]

_COPIES = ("MemcpyFromHost", "MemcpyToHost")
# A row of so many columns is run.
_COLUMNS = 8


@dataclass(frozen=True)
class Placement:
    """Where one graph of a package runs; providers by ONNX Runtime's names.

    Attributes:
        nodes: Provider -> operator -> how many nodes it was given, those inside of what it compiles too;
            None where this version of ONNX Runtime does not tell.
        kernels: Provider -> kernel -> how many one call runs; a compiled part of the graph is one.
        copies: Direction -> how many copies between devices one call makes inside the graph.
    """

    nodes: Counts | None
    kernels: Counts
    copies: Mapping[str, int]

    @property
    def counts(self) -> Counts:
        """Nodes where they are known, kernels elsewhere."""
        return self.kernels if self.nodes is None else self.nodes

    def summary(self) -> str:
        """One line: how many by provider, and copies."""
        word = "kernels" if self.nodes is None else "nodes"
        parts = [f"{name} {sum(found.values())} {word}" for name, found in self.counts.items()]
        copies = ", ".join(f"{count} {name}" for name, count in self.copies.items())
        return "; ".join((", ".join(parts), f"copies between devices: {copies or 'none'}"))


def package_placement(package: Package, config: SessionConfig) -> dict[str, Placement]:
    """Open every graph of a package as it is, run it once on one row of zeros, and ask.

    Args:
        package: The package.
        config: Provider and options.

    Returns:
        Graph name -> placement.

    Raises:
        ProviderError: The provider is not known or not available, does not run such packages, leaves heavy
            nodes to the CPU, or fails to run a graph.
        PackageError: ONNX Runtime cannot load a graph.
    """
    check_runs(package.manifest, config)
    in_place = any(state.update == "in_place" for state in package.manifest.states)
    found = {}
    for name, graph in package.manifest.graphs.items():
        with tempfile.TemporaryDirectory(prefix="onnxlm-placement-") as folder:
            options = session_options(config)
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / name)
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            session = open_session(package.graph_path(name), config, options)
            profile = _profile_of_run(session, _feeds(graph.inputs, in_place))
            events = json.loads(profile.read_text(encoding="utf-8"))
        kernels, copies = count_kernels(events)
        found[name] = Placement(assigned_nodes(session), kernels, copies)
    return found


def count_kernels(events: Iterable[Mapping[str, Any]]) -> tuple[Counts, dict[str, int]]:
    """Kernels by provider, and copies between devices, in the events of ONNX Runtime's profiler.

    Source: onnxruntime/core/framework/sequential_executor.cc, event "<node>_kernel_time".
    """
    kernels: dict[str, Counter[str]] = {}
    copies: Counter[str] = Counter()
    for event in events:
        if event.get("cat") != "Node" or not str(event.get("name")).endswith("_kernel_time"):
            continue
        operator = event["args"]["op_name"]
        if operator in _COPIES:
            copies[operator] += 1
        else:
            kernels.setdefault(event["args"]["provider"], Counter())[operator] += 1
    return {name: dict(found.most_common()) for name, found in kernels.items()}, dict(copies)


def _profile_of_run(session: ort.InferenceSession, feeds: Mapping[str, NDArray[Any]]) -> Path:
    """The file of events of one run; closed in any case, as its folder goes."""
    try:
        session.run(None, feeds)
    except Exception as error:  # onnxruntime raises its own classes, one a status code
        raise run_error(session, error) from error
    finally:
        profile = Path(session.end_profiling())
    return profile


def _feeds(inputs: Iterable[TensorSpec], in_place: bool) -> dict[str, NDArray[Any]]:
    """One new token behind what fills the rest of a row."""
    past = _COLUMNS if in_place else _COLUMNS - 1
    sizes = {io_spec.BATCH: 1, io_spec.SEQUENCE: 1, io_spec.TOTAL: _COLUMNS}
    sizes |= dict.fromkeys((io_spec.PAST, io_spec.WINDOW_PAST), past)
    feeds: dict[str, NDArray[Any]] = {}
    for spec in inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        if spec.name not in io_spec.OPTIONAL:
            feeds[spec.name] = np.zeros(shape, dtype=spec.dtype)
    feeds[io_spec.ATTENTION_MASK][:] = 1
    return feeds
