"""What a model is made of: parameters and bytes by component, and what its cache takes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxlm.components import Component, components_of
from onnxlm.errors import ConfigError, InputError
from onnxlm.external_data import tensor_bytes
from onnxlm.io_spec import StateSpec
from onnxlm.manifest import is_package
from onnxlm.package import Package, open_package

if TYPE_CHECKING:
    from onnxlm.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class KvCache:
    """What a row's cache takes.

    Attributes:
        attention: "MHA" (a key head for each query head), "GQA" (one for several), "MQA" (one for all) or
            "MLA" (one compressed vector is key and value of all).
        layers: Layers with a cache.
        query_heads: Query heads of a layer.
        kv_heads: Key and value heads of a layer.
        head_dim: Width of a head.
        dtype: Element type.
        bytes_per_token: Bytes of one more position.
        bytes_at: Bytes of a row by its length.
        window_layers: Layers that keep the tokens of a sliding window only.
        window_tokens: How many tokens these keep at most.
    """

    attention: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_token: int
    bytes_at: Mapping[int, int]
    window_layers: int = 0
    window_tokens: int = 0


@dataclass(frozen=True)
class Inspection:
    """Everything `onnxlm inspect` tells.

    Attributes:
        source: What was inspected.
        kind: "package", "huggingface", "gguf", "config" (a config.json without weights) or "preset" (one of
            `onnxlm.models.presets`).
        model_type: The model family.
        context_length: Most positions the model was made for; None where that is not known.
        components: Weights by kind; empty when only the cache is known.
        kv_cache: The cache of one row; None for what has none or whose cache is not known.
        active_parameters: Of how many a token makes use, where experts take turns; None where all, or where
            it is not known.
        notes: What limits these figures.
        package: The package, if it is one.
    """

    source: str
    kind: str
    model_type: str
    context_length: int | None
    components: tuple[Component, ...]
    kv_cache: KvCache | None
    active_parameters: int | None = None
    notes: tuple[str, ...] = ()
    package: Package | None = field(default=None, repr=False)


def inspect(source: str | Path, kv_lengths: Sequence[int] | None = None) -> Inspection:
    """Look at a package, a checkpoint, a config.json alone, or a preset. No weight is read or allocated.

    Args:
        source: A package, what `onnxlm.models.checkpoint.read` accepts, a config.json or its folder, or the
            name of a preset, unless something on disk is called so.
        kv_lengths: Lengths at which the cache is measured; a few up to the context when None.

    Raises:
        OnnxlmError: The source is none of these, or is damaged.
    """
    wrong = [length for length in kv_lengths or () if length < 1]
    if wrong:
        raise InputError("length of a cache", found=wrong[0], allowed="1 and more")
    if is_package(source):
        return inspect_package(open_package(source), kv_lengths)
    from onnxlm.config_inspection import config_without_weights, inspect_config, inspect_preset
    from onnxlm.models.checkpoint import read

    if _is_plain_name(source):
        return inspect_preset(str(source), kv_lengths)
    config = config_without_weights(Path(source))
    if config is not None:
        return inspect_config(config, kv_lengths)
    return _inspect_checkpoint(read(source), kv_lengths)


def _is_plain_name(source: str | Path) -> bool:
    """Whether this names neither a path that exists or could, nor a Hub id, nor a function in a file."""
    return not Path(source).exists() and not set(str(source)) & set("/\\:")


def inspect_package(package: Package, kv_lengths: Sequence[int] | None = None) -> Inspection:
    """Look at a package; without the "export" extra parameters are not counted."""
    manifest = package.manifest
    raw = package.read_json("config.json")
    sizes: dict[str, int] = {}
    for name in manifest.graphs:
        sizes |= tensor_bytes(package.graph_path(name))  # shared tensors have one name
    notes: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] = {}
    tied, active = bool(raw.get("tie_word_embeddings")), None
    try:
        shapes, tied, active = _parameters(raw)
    except ModuleNotFoundError:
        notes = ("parameters are counted where the 'export' extra is installed",)
    except ConfigError:  # a model of the user's own
        notes = (f"'{manifest.architecture}' is no family: parameters are not counted",)
    return Inspection(
        source=str(package.path),
        kind="package",
        model_type=manifest.architecture,
        context_length=manifest.context_length,
        components=components_of(sizes, shapes, tied),
        kv_cache=kv_cache_of(
            manifest.states, raw.get("num_attention_heads"), kv_lengths, manifest.context_length
        ),
        active_parameters=active,
        notes=notes,
        package=package,
    )


def _inspect_checkpoint(checkpoint: Checkpoint, kv_lengths: Sequence[int] | None) -> Inspection:
    from onnxlm.config_inspection import active_parameters, states_of
    from onnxlm.models.checkpoint.matching import outline

    config = checkpoint.config
    module = outline(checkpoint.architecture, config)
    return Inspection(
        source=str(checkpoint.path),
        kind=checkpoint.kind,
        model_type=config.model_type,
        context_length=config.max_position_embeddings,
        components=components_of(
            {name: tensor.nbytes for name, tensor in checkpoint.tensors.items()},
            {name: tensor.shape for name, tensor in checkpoint.tensors.items()},
            config.tie_word_embeddings,
        ),
        kv_cache=kv_cache_of(
            states_of(module.state_shapes, module.windows),
            config.num_attention_heads,
            kv_lengths,
            config.max_position_embeddings,
        ),
        active_parameters=active_parameters(module),
    )


def _parameters(raw: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], bool, int | None]:
    """Shapes of the parameters that a config gives, whether the head is tied, how many a token uses."""
    from onnxlm.config_inspection import active_parameters, parse

    config, module = parse(raw, "config.json")
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return shapes, config.tie_word_embeddings, active_parameters(module)


def kv_cache_of(
    states: Sequence[StateSpec],
    query_heads: int | None,
    kv_lengths: Sequence[int] | None,
    context_length: int | None,
) -> KvCache | None:
    """Measure the caches of one row as the runtime allocates them.

    Args:
        states: The model's states.
        query_heads: Query heads of a layer; as many as key heads when None.
        kv_lengths: Lengths to measure; None takes some usual ones up to the context.
        context_length: Most positions.
    """
    from onnxlm.runtime.state_buffers import bytes_at, widest_window, window_columns

    window = widest_window(states)
    most = window_columns(window, context_length or sys.maxsize)
    short = bool(window) and most != context_length
    latent = [state for state in states if state.past.endswith(".latent")]
    keys = latent or [state for state in states if state.past.endswith(".key")]
    if not keys:
        return None
    _, kv_heads, _, head_dim = keys[0].shape
    queries = query_heads or int(kv_heads)
    return KvCache(
        attention="MLA" if latent else _attention_kind(queries, int(kv_heads)),
        layers=len(keys),
        query_heads=queries,
        kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        dtype=keys[0].dtype,
        bytes_per_token=bytes_at(states, 1, 2) - bytes_at(states, 1, 1),
        bytes_at={
            length: bytes_at(states, 1, length)
            for length in kv_lengths or _usual_lengths(context_length)
        },
        window_layers=sum(state.window > 0 for state in keys) if short else 0,
        window_tokens=most if short else 0,
    )


def _attention_kind(query_heads: int, kv_heads: int) -> str:
    if query_heads == kv_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def _usual_lengths(context_length: int | None) -> Iterable[int]:
    if context_length is None:
        return (1024, 4096)
    return sorted({*(n for n in (1024, 4096) if n < context_length), context_length})
