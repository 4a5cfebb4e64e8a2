"""The model configuration: one frozen dataclass with Hugging Face's key names, and its strict reader."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from onnxlm.errors import ConfigError
from onnxlm.models.ignored_keys import IGNORED_KEYS
from onnxlm.models.layers.activation import ACTIVATIONS
from onnxlm.models.layers.rotary import RopeConfig
from onnxlm.models.rope_reading import read_rope

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Numbers that every decoder-only model has, by Hugging Face key name; families add theirs by subclass.

    Attributes:
        model_type: Name of the architecture's file.
        max_position_embeddings: Most positions of a row.
        further_layers: Stored layers behind the model's own that predict further tokens; they are not loaded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    further_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(ModelConfig):
    """What most families since Llama have besides.

    Attributes:
        head_dim: Width of one attention head; need not be hidden_size / num_attention_heads.
        rope: Rotary settings.
        hidden_act: Name of the activation, see `layers/activation.py`.
    """

    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False


class ConfigReader:
    """Reads keys of a config.json and refuses, by name, every key that nothing has read.

    Args:
        raw: The parsed config.
        source: Where it came from, for messages.
    """

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw = raw
        self._source = source
        self._read: set[str] = set()
        self._spellings: dict[str, str] = {}

    def spelled(self, spellings: Mapping[str, str]) -> None:
        """Read usual keys under a family's own names; the usual ones are understood too.

        Args:
            spellings: Usual key -> the family's, as in {"hidden_size": "n_embd"}.

        Raises:
            ConfigError: Both are there and differ.
        """
        raw = dict(self._raw)
        for usual, own in spellings.items():
            if raw.get(own) is None:
                raw.pop(own, None)
                continue
            value = raw.pop(own)
            if raw.setdefault(usual, value) != value:
                raise ConfigError(
                    f"{self._source}: fields '{own}' and '{usual}' differ",
                    found=f"{value!r} and {raw[usual]!r}",
                    fix=f"remove '{usual}'",
                )
        self._raw = raw
        self._spellings.update(spellings)

    def _shown(self, key: str) -> str:
        return self._spellings.get(key, key)

    def fault(self, key: str, found: object, allowed: str) -> ConfigError:
        """The error for a field whose value no model can have."""
        return ConfigError(
            f"{self._source}: field '{self._shown(key)}'",
            found=found,
            allowed=allowed,
            fix="correct the config",
        )

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key` as `kind`; `default` where it is absent or null.

        Raises:
            ConfigError: The key is absent without a default, of another type, or no finite number.
        """
        self._read.add(key)
        value = self._raw.get(key)
        if value is None:
            if default is None:
                raise ConfigError(
                    f"{self._source}: field '{self._shown(key)}' is missing",
                    fix=f"add '{self._shown(key)}' ({kind.__name__}) to the config",
                )
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(
                f"{self._source}: field '{self._shown(key)}' has a wrong type",
                found=repr(value),
                allowed=kind.__name__,
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise self.fault(key, value, "a finite number")
        return value

    def optional(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of `key` as `kind`; None where it is null, `default` where it is absent.

        Raises:
            ConfigError: It has another type.
        """
        self._read.add(key)
        if key not in self._raw:
            return default
        return None if self._raw[key] is None else self.get(key, kind)

    def a_layer_each(self, key: str, kind: type[T], layers: int) -> tuple[T, ...] | None:
        """A list with a value for each layer; None where it is absent or null.

        Raises:
            ConfigError: It is no list of such values, or too short.
        """
        self._read.add(key)
        values = self._raw.get(key)
        if values is None:
            return None
        whole = isinstance(values, list) and all(type(value) is kind for value in values)
        if not whole or len(values) < layers:
            raise ConfigError(
                f"{self._source}: field '{self._shown(key)}'",
                found=repr(values),
                allowed=f"a list of {kind.__name__}, one for each of {layers} layers",
            )
        return tuple(values[:layers])

    def items(self, key: str, kind: type[T]) -> tuple[T, ...] | None:
        """The list of `key`, all of one type; None where it is absent or null.

        Raises:
            ConfigError: It is no list, or an entry has another type.
        """
        self._read.add(key)
        value = self._raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise ConfigError(
                f"{self._source}: field '{self._shown(key)}' has a wrong type",
                found=repr(value),
                allowed=f"a list of {kind.__name__}",
            )
        return tuple(value)

    def raw(self, key: str) -> Any:
        """The value of `key` as it stands, whose form the family checks; None where it is absent."""
        self._read.add(key)
        return self._raw.get(key)

    def mapping(self, key: str) -> dict[str, Any]:
        """A dictionary; empty where the key is absent or null.

        Raises:
            ConfigError: The value is none.
        """
        self._read.add(key)
        value = self._raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(
                f"{self._source}: field '{self._shown(key)}' has a wrong type",
                found=repr(value),
                allowed="an object",
            )
        return dict(value or {})

    def unused(self, *keys: str) -> None:
        """Take note of keys that change no number of this family."""
        self._read.update(keys)

    def positive(self, key: str, default: int | None = None) -> int:
        """An int above 0."""
        value = self.get(key, int, default)
        if value <= 0:
            raise self.fault(key, value, "above 0")
        return value

    def positive_float(self, key: str, default: float) -> float:
        """A number above 0, for what numbers are divided by."""
        value = self.get(key, float, default)
        if value <= 0:
            raise self.fault(key, value, "above 0")
        return value

    def same(self, key: str, other: str) -> None:
        """Give `key` the value of `other` where it is absent or null."""
        if self._raw.get(key) is None:
            self._raw = {**self._raw, key: self._raw.get(other)}

    def divides(self, part: str, whole: str) -> None:
        """Refuse a config whose count `part` does not divide `whole`."""
        a, b = self.positive(part), self.positive(whole)
        if b % a:
            raise ConfigError(
                f"{self._source}: '{self._shown(whole)}' is no multiple of '{self._shown(part)}'",
                found=f"{b} and {a}",
                fix="correct the config",
            )

    def only(self, key: str, *allowed: object) -> None:
        """Refuse any value of `key` but the allowed ones (the first is the default)."""
        self._read.add(key)
        value = self._raw.get(key, allowed[0])
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{self._source}: field '{self._shown(key)}' is not supported with this value",
                found=repr(value),
                allowed=", ".join(map(repr, allowed)),
            )

    def rope(self, theta: float = 10000.0, *, longrope: bool = False) -> RopeConfig:
        """Rotary settings from `rope_parameters`, or from `rope_scaling` with a top-level `rope_theta`.

        Args:
            theta: The base where the config does not say.
            longrope: The family's `DecoderLM` is given `longrope_switch`.
        """
        self._read |= {"rope_parameters", "rope_scaling", "rope_theta"}
        raw = self._rope_settings()
        if "partial_rotary_factor" in self._read or raw.get("partial_rotary_factor") == 1.0:
            raw.pop("partial_rotary_factor", None)
        base = self._raw.get("rope_theta")
        rope = read_rope(raw, theta if base is None else base, self._source)
        if rope.rope_type == "longrope" and not longrope:
            raise ConfigError(f"{self._source}: this family has no rope_type 'longrope'")
        return rope

    def rotary_share(self, default: float) -> float:
        """`partial_rotary_factor`, the share of a head's widths that turn; call it before `rope`.

        It stands among the rotary settings, or beside them.

        Args:
            default: The share where the config does not say.
        """
        share: Any = self.get("partial_rotary_factor", float, default)
        inner = self._rope_settings().get("partial_rotary_factor")
        if inner is not None:
            share = inner
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise self.fault("partial_rotary_factor", repr(share), "above 0, at most 1")
        return float(share)

    def _rope_settings(self) -> dict[str, Any]:
        return self.mapping("rope_parameters") or self.mapping("rope_scaling")

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        """The name of an activation.

        Raises:
            ConfigError: There is none of that name.
        """
        name = self.get(key, str, default)
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"{self._source}: field '{self._shown(key)}' is no activation that is supported",
                found=repr(name),
                allowed=", ".join(ACTIVATIONS),
            )
        return name

    def model_fields(self, tied: bool = False, positions: int = 2048) -> dict[str, Any]:
        """Fields of `ModelConfig` under the names that most families use.

        Args:
            tied: Whether head and embedding are one where the config does not say.
            positions: `max_position_embeddings` where it does not say.
        """
        return {
            "model_type": self.get("model_type", str),
            "vocab_size": self.positive("vocab_size"),
            "hidden_size": self.positive("hidden_size"),
            "num_hidden_layers": self.positive("num_hidden_layers"),
            "num_attention_heads": self.positive("num_attention_heads"),
            "max_position_embeddings": self.positive("max_position_embeddings", positions),
            "tie_word_embeddings": self.get("tie_word_embeddings", bool, tied),
        }

    def rotary_fields(
        self,
        *,
        tied: bool = False,
        eps: float = 1e-6,
        theta: float = 10000.0,
        biases: bool = True,
        positions: int = 2048,
        head_dim: int | None = None,
        rope: RopeConfig | None = None,
    ) -> dict[str, Any]:
        """Fields of `RotaryConfig` under the names that most families use.

        Args:
            tied: Whether head and embedding are one where the config does not say.
            eps: `rms_norm_eps` where the config does not say.
            theta: `rope_theta` where the config does not say.
            biases: Whether the family has `attention_bias` and `mlp_bias`.
            positions: `max_position_embeddings` where the config does not say.
            head_dim: Width of a head where it does not say; hidden_size / num_attention_heads when None.
            rope: Rotary settings that are read already.
        """
        fields = self.model_fields(tied, positions)
        self.divides("num_key_value_heads", "num_attention_heads")
        width = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
        fields |= {
            "intermediate_size": self.positive("intermediate_size"),
            "num_key_value_heads": self.positive("num_key_value_heads"),
            "head_dim": self.positive("head_dim", width),
            "rms_norm_eps": self.get("rms_norm_eps", float, eps),
            "rope": self.rope(theta) if rope is None else rope,
            "hidden_act": self.activation(),
        }
        if biases:
            fields["attention_bias"] = self.get("attention_bias", bool, False)
            fields["mlp_bias"] = self.get("mlp_bias", bool, False)
        return fields

    def finish(self) -> None:
        """Refuse keys that nothing has read: what changes numbers is never ignored.

        Raises:
            ConfigError: Names the unread keys.
        """
        unread = sorted(
            key
            for key, value in self._raw.items()
            if key not in self._read and key not in IGNORED_KEYS and value not in (None, False)
        )
        if unread:
            raise ConfigError(
                f"{self._source}: fields that this architecture does not read",
                found=", ".join(f"{self._shown(key)}={self._raw[key]!r}" for key in unread),
                allowed=", ".join(sorted(map(self._shown, self._read))),
                fix="remove them if they change nothing",
            )
