"""Quantized graphs beside the weights that their codes mean, run in PyTorch.

Legend of shapes: S tokens, V vocabulary size, E experts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from parity.tolerances import tolerance
from torch import Tensor, nn

from onnxlm import io_spec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.package import Package
from support.exported import DATA, Level, Runner
from support.parity import assert_logits_close
from support.quantized import eager_logits, new_folder

# One part through prefill, the rest through decode; every id of a vocabulary of 96 may come.
IDS = np.random.default_rng(0).integers(0, 96, 24).tolist()
PREFILL = 16
EXACT = tolerance("graph", "float32")
ROUNDED = tolerance("activations", "int8")
ROUNDED_EXPERTS = tolerance("experts", "int8")
_ROUTER = ".router.gate.weight"


def assert_computes(package: Package, model: DecoderLM, exact: float = EXACT) -> None:
    """The graphs compute what `model` does, but for the activations that they round.

    Args:
        package: The package.
        model: Its weights, in fp32.
        exact: The bound where activations are not rounded to 8 bits.

    With the accuracy level turned down, nothing is rounded but the inputs of 8-bit experts: QMoE rounds those
    at every level.
    """
    if package.manifest.lowering == "portable":
        assert_follows(package.path, model, exact, optimized=False)
    else:
        folder = _exact_copy(package)
        bound = ROUNDED_EXPERTS if 8 in expert_bits(package.path) else exact
        for optimized in (False, True):
            assert_follows(folder, model, bound, optimized)
    assert_follows(package.path, model, ROUNDED)


def assert_follows(folder: Path, model: DecoderLM, bound: float, optimized: Level = True) -> None:
    """Logits of all tokens, and those of routers, are within `bound` of the model's.

    A rounding can send a token that is near a tie to other experts, whose outcome is another number
    altogether. So the model sends each token where the graph has sent it.
    """
    if not has_routers(folder):
        actual = graph_logits(folder, IDS, PREFILL, optimized)
        assert_logits_close(actual, eager_logits(model, IDS), bound)
        return
    runner = RoutingRunner(folder, optimized)
    actual = run_logits(runner, IDS, PREFILL)
    expected, routers = logits_routed_by(model, runner.routing())
    assert_logits_close(actual, expected, bound)
    for name, theirs in routers.items():
        assert_logits_close(runner.routing()[name], theirs, bound)


def graph_logits(folder: Path, ids: Sequence[int], prefill: int, optimized: Level = True) -> Tensor:
    """Logits [S, V]: the first tokens by the prefill graph, the others by the decode graph."""
    return run_logits(Runner(folder, optimized), ids, prefill)


def run_logits(runner: Runner, ids: Sequence[int], prefill: int) -> Tensor:
    """Logits [S, V]: the first tokens by the runner's prefill graph, the others by its decode graph."""
    logits, past = runner.run([list(ids[:prefill])], runner.empty(), keep=prefill)
    parts = [logits[0]]
    for token in ids[prefill:]:
        logits, past = runner.step([token], past)
        parts.append(logits[0])
    return torch.cat(parts)


class RoutingRunner(Runner):
    """A runner that keeps the logits of every router, by the name of its layer."""

    def __init__(self, folder: Path, optimized: Level) -> None:
        self._parts: dict[str, list[Tensor]] = {}
        super().__init__(_copy(folder, self._show), optimized)

    def _show(self, graph: ir.Graph) -> None:
        """Make the logits of routers outputs."""
        for name in [name for name in graph.initializers if name.endswith(_ROUTER)]:
            ((product, _),) = graph.initializers[name].uses()
            value, layer = product.outputs[0], name.removesuffix(".weight")
            if f"{layer}.bias" in graph.initializers:
                ((addition, _),) = value.uses()
                value = addition.outputs[0]
            value.name = layer
            graph.outputs.append(value)
            self._parts[layer] = []

    def _outputs(
        self, session: ort.InferenceSession, feeds: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        outputs = super()._outputs(session, feeds)
        for layer, parts in self._parts.items():
            parts.append(torch.from_numpy(outputs[layer][0]))
        return outputs

    def routing(self) -> dict[str, Tensor]:
        """Logits [S, E] of all tokens so far."""
        return {layer: torch.cat(parts) for layer, parts in self._parts.items()}


def logits_routed_by(
    model: DecoderLM, routing: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of `IDS` where routers say what they are told, and what they would have said."""
    own: dict[str, Tensor] = {}

    def say(layer: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            own[layer] = output[0]
            return routing[layer][None]

        return hook

    hooks = [model.get_submodule(layer).register_forward_hook(say(layer)) for layer in routing]
    try:
        return eager_logits(model, IDS), own
    finally:
        for hook in hooks:
            hook.remove()


def has_routers(folder: Path) -> bool:
    """Whether there are experts to choose."""
    graph = ir.load(folder / f"{io_spec.DECODE}.onnx").graph
    return any(name.endswith(_ROUTER) for name in graph.initializers)


def expert_bits(folder: Path) -> set[int]:
    """Widths of the codes of experts."""
    return {
        node.attributes["expert_weight_bits"].as_int()
        for node in ir.load(folder / f"{io_spec.DECODE}.onnx").graph
        if node.op_type == "QMoE"
    }


def _exact_copy(package: Package) -> Path:
    """Where ONNX Runtime's operators run at another accuracy level, with activations in fp32."""

    def turn_down(graph: ir.Graph) -> None:
        for node in graph:
            if node.op_type in ("MatMulNBits", "QMoE"):
                assert node.attributes["accuracy_level"].as_int() == 4
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)

    return _copy(package.path, turn_down)


def _copy(folder: Path, edit: Callable[[ir.Graph], None]) -> Path:
    copy = new_folder()
    for name in (io_spec.PREFILL, io_spec.DECODE):
        model = ir.load(folder / f"{name}.onnx")
        edit(model.graph)
        ir.save(model, copy / f"{name}.onnx")
    shutil.copyfile(folder / DATA, copy / DATA)
    return copy
