"""What a config alone tells of a model: shapes of supported families, the cache of some others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxlm import io_spec
from onnxlm.components import components_of
from onnxlm.errors import ConfigError, InputError, OnnxlmError
from onnxlm.inspection import Inspection, kv_cache_of
from onnxlm.io_spec import StateSpec
from onnxlm.models.checkpoint.folder import inside, read_json
from onnxlm.models.checkpoint.huggingface import CONFIG
from onnxlm.models.checkpoint.matching import outline
from onnxlm.models.checkpoint.safetensors_file import has_weights, read_folder
from onnxlm.models.checkpoint.source import ACCEPTED
from onnxlm.models.config import ConfigReader, ModelConfig
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.moe import SparseMLP
from onnxlm.models.presets import SOURCE, preset_names, read_preset
from onnxlm.models.registry import architecture_names, find_architecture

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Endings of class names whose models keep one self-attention cache that grows with every token.
_DECODERS = ("ForCausalLM", "LMHeadModel")


def config_without_weights(path: Path) -> Path | None:
    """The config.json that is all there is, or whose family has no reader; None for a whole checkpoint."""
    if path.is_file() and path.suffix == ".json":
        return path
    config = path / CONFIG
    if not config.is_file() or any(path.glob("*.gguf")):
        return None
    if not has_weights(path):
        return config
    return (
        None
        if read_json(inside(path, CONFIG)).get("model_type") in architecture_names()
        else config
    )


def inspect_config(file: Path, kv_lengths: Sequence[int] | None) -> Inspection:
    """Look at a config.json; weights beside it are measured by their names.

    Raises:
        ConfigError: The config is incomplete, or of a family nothing is known of.
    """
    raw = read_json(file)
    if raw.get("model_type") not in architecture_names():
        return _inspect_foreign(file, raw, kv_lengths)
    return _inspect_known(raw, str(file), "config", kv_lengths)


def inspect_preset(name: str, kv_lengths: Sequence[int] | None) -> Inspection:
    """Look at a model of known size.

    Raises:
        InputError: There is no preset of that name.
    """
    if name not in preset_names():
        raise InputError(
            f"{name}: no such file, folder or preset",
            allowed=f"a package; {ACCEPTED}; or a preset: {', '.join(preset_names())}",
        )
    raw = read_preset(name)
    source = raw.pop(SOURCE)
    found = _inspect_known(raw, name, "preset", kv_lengths)
    return replace(found, notes=(*found.notes, f"sizes: {source}"))


def _inspect_known(
    raw: Mapping[str, Any], source: str, kind: str, kv_lengths: Sequence[int] | None
) -> Inspection:
    """A supported family: weights and cache counted in the config's element type."""
    config, module = parse(raw, source)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    width = _BYTES.get(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), 4)
    sizes = {name: width * math.prod(shape) for name, shape in shapes.items()}
    return Inspection(
        source=source,
        kind=kind,
        model_type=config.model_type,
        context_length=config.max_position_embeddings,
        components=components_of(sizes, shapes, config.tie_word_embeddings),
        kv_cache=kv_cache_of(
            states_of(module.state_shapes, module.windows, f"float{8 * width}"),
            config.num_attention_heads,
            kv_lengths,
            config.max_position_embeddings,
        ),
        active_parameters=active_parameters(module),
        notes=(f"there are no weights: weights and cache are counted with {8 * width} bits each",),
    )


def active_parameters(module: DecoderLM) -> int | None:
    """How many parameters a token makes use of; None where it is all of them."""
    blocks = [block for block in module.modules() if isinstance(block, SparseMLP)]
    idle = 0
    for block in blocks:
        count = len(block.experts.gate_up)
        routed = sum(parameter.numel() for parameter in block.experts.parameters())
        idle += routed // count * (count - int(getattr(block.router, "top_k", count)))
    if not idle:
        return None
    return sum(parameter.numel() for parameter in module.parameters()) - idle


def parse(raw: Mapping[str, Any], source: str) -> tuple[ModelConfig, DecoderLM]:
    """A supported family's config, and the module without weights.

    Raises:
        ConfigError: The family is not supported, or a field is missing or wrong.
    """
    reader = ConfigReader(raw, source)
    architecture = find_architecture(reader.get("model_type", str))
    config = architecture.parse_config(reader)
    return config, outline(architecture, config)


def states_of(
    layers: Sequence[Mapping[str, tuple[int, int]]],
    windows: Sequence[int],
    dtype: str = "float32",
) -> list[StateSpec]:
    """The states that a package of a model has.

    Args:
        layers: (heads, width) of each state by its name, a layer.
        windows: Of each layer, 0 for none.
        dtype: Element type.
    """
    return [
        StateSpec(
            io_spec.past_name(i, part),
            io_spec.present_name(i, part),
            dtype,
            (io_spec.BATCH, heads, io_spec.WINDOW_PAST if window else io_spec.PAST, width),
            "in_place",
            window=window,
        )
        for i, (kept, window) in enumerate(zip(layers, windows, strict=True))
        for part, (heads, width) in kept.items()
    ]


def _inspect_foreign(
    file: Path, raw: Mapping[str, Any], kv_lengths: Sequence[int] | None
) -> Inspection:
    """A family that cannot be exported: what transformers and optimum know of its config."""
    model_type = raw.get("model_type")
    config = _foreign_config(file, raw)
    context = getattr(config, "max_position_embeddings", None)
    notes = [f"model_type '{model_type}' cannot be exported yet"]
    cache = None
    if any(str(name).endswith(_DECODERS) for name in raw.get("architectures") or ()):
        shape = (_kv_heads(config), _head_dim(config))
        cache = kv_cache_of(
            states_of(
                [dict.fromkeys(("key", "value"), shape)] * config.num_layers,
                [0] * config.num_layers,
            ),
            config.num_attention_heads,
            kv_lengths,
            context,
        )
        if getattr(config.config, "sliding_window", None):
            notes.append("layers with a sliding window need less cache than these figures")
    stored = read_folder(file.parent)[0] if has_weights(file.parent) else {}
    return Inspection(
        source=str(file),
        kind="huggingface" if stored else "config",
        model_type=str(model_type),
        context_length=context if isinstance(context, int) else None,
        components=components_of(
            {name: tensor.nbytes for name, tensor in stored.items()},
            {name: tensor.shape for name, tensor in stored.items()},
            bool(getattr(config.config, "tie_word_embeddings", False)),
        )
        if stored
        else (),
        kv_cache=cache,
        notes=tuple(notes),
    )


def _foreign_config(file: Path, raw: Mapping[str, Any]) -> Any:
    """The config under optimum's names, with transformers' defaults for what the file leaves out."""
    from optimum.utils import NormalizedConfigManager
    from transformers import AutoConfig

    fields = dict(raw)
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError(f"{file}: field 'model_type' is missing", fix="add it to the config")
    try:
        names = NormalizedConfigManager.get_normalized_config_class(model_type)
        return names(AutoConfig.for_model(model_type, **fields))
    except OnnxlmError:
        raise
    except (
        Exception
    ) as error:  # two libraries' own complaints about an unknown type or a wrong field
        raise ConfigError(
            f"{file}: model_type is not supported",
            found=repr(model_type),
            allowed=", ".join(architecture_names()),
        ) from error


def _kv_heads(config: Any) -> int:
    hf = config.config
    if getattr(hf, "multi_query", False) and not getattr(hf, "new_decoder_architecture", False):
        return 1
    heads = getattr(hf, "num_key_value_heads", None) or getattr(hf, "num_kv_heads", None)
    return int(heads or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    width = getattr(config.config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)
