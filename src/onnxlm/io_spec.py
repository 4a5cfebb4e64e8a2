"""Names, element types and symbolic axes of every graph input and output: spelled here only.

The names are those that the ecosystem's runtimes use. Legend of the symbolic axes, one for the whole project:

* ``batch_size`` (B), ``sequence_length`` (S): rows, and new tokens a row, of one call;
* ``past_sequence_length`` (P): cached columns before the call;
* ``total_sequence_length`` (T): P + S.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxlm.strict_json import YOUNGER

BATCH = "batch_size"
SEQUENCE = "sequence_length"
PAST = "past_sequence_length"
TOTAL = "total_sequence_length"

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
LOGITS = "logits"
# int64 [batch_size, 1]: arg-max of the last kept logits row, so that greedy decoding copies no logits.
NEXT_TOKENS = "next_tokens"
# int64 scalar, optional (default 1): prefill returns the logits of this many last real tokens of each row.
LOGITS_TO_KEEP = "num_logits_to_keep"

PREFILL = "prefill"
DECODE = "decode"


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output.

    Attributes:
        name: The tensor's name in the graph.
        dtype: numpy spelling of the element type ("float32", "int64").
        shape: Numbers for fixed axes, names for symbolic ones.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class StateSpec:
    """A tensor that one call hands to the next: a key or value cache, later a recurrent state.

    Attributes:
        past: Graph input that takes the state.
        present: Graph output that returns it.
        dtype: numpy spelling of the element type.
        shape: Shape of `past`; the axis that grows is named ``past_sequence_length``.
        update: "in_place" when past and present may be one buffer of any capacity (GroupQueryAttention),
            "append" when present is past with the new columns behind it (standard ONNX Attention).
        twin: A second graph output that takes the same buffer as `present`: attention over a cache that is
            key and value at once writes it twice. "" where there is none. Columns of such a buffer that hold
            no token must hold numbers, whichever: a step multiplies them by 0.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str, ...]
    update: str
    twin: str = field(default="", metadata={YOUNGER: True})


PAST_PREFIX = "past_key_values."
_PRESENT_PREFIX = "present."


def past_name(layer: int, part: str) -> str:
    """Graph input that holds `part` ("key", "value" or "latent") of a layer's cache."""
    return f"{PAST_PREFIX}{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Graph output that returns `part` ("key", "value" or "latent") of a layer's cache."""
    return f"{_PRESENT_PREFIX}{layer}.{part}"


def present_of(past: str) -> str:
    """The graph output that returns the state taken by graph input `past`."""
    return _PRESENT_PREFIX + past.removeprefix(PAST_PREFIX)


_TWIN_SUFFIX = ".twin"


def twin_of(present: str) -> str:
    """The graph output that is bound to the buffer of graph output `present` too."""
    return present + _TWIN_SUFFIX
