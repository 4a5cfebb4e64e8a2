"""Names, element types and symbolic axes of every graph input and output: spelled here only.

The names are those that the ecosystem's runtimes use. Legend of the symbolic axes, one for the whole project:

* ``batch_size`` (B), ``sequence_length`` (S): rows, and new tokens a row, of one call;
* ``past_sequence_length`` (P): cached columns before the call;
* ``total_sequence_length`` (T): P + S;
* ``window_past_length``, ``window_total_length``: the same two of layers with a sliding window, whose
  caches may have lost the first columns (`EVICTED`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxlm.strict_json import YOUNGER

BATCH = "batch_size"
SEQUENCE = "sequence_length"
PAST = "past_sequence_length"
TOTAL = "total_sequence_length"
WINDOW_PAST = "window_past_length"
WINDOW_TOTAL = "window_total_length"

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
LOGITS = "logits"
# int64 [batch_size, 1]: arg-max of the last kept logits row, so that greedy decoding copies no logits.
NEXT_TOKENS = "next_tokens"
# int64 scalar, optional (default 1): prefill returns the logits of this many last real tokens of each row.
LOGITS_TO_KEEP = "num_logits_to_keep"
# int64 [batch_size, 1], optional: how many of each row's first tokens are gone from the caches of layers with
# a sliding window, which then are buffers of any capacity. Without it (its default is [1, 0]) none is gone,
# and these caches are as long as the others. Of graphs whose states are updated in place.
EVICTED = "num_evicted_tokens"
# Its axes; the first is no `batch_size`, as its default has one row for any.
EVICTED_AXES = ("evicted_rows", "evicted_given")
# Inputs that have a default.
OPTIONAL = frozenset({LOGITS_TO_KEEP, EVICTED})

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
        shape: Shape of `past`; the axis that grows is named ``past_sequence_length``, or
            ``window_past_length`` where there is a window.
        update: "in_place" when past and present may be one buffer of any capacity (GroupQueryAttention),
            "append" when present is past with the new columns behind it (standard ONNX Attention).
        twin: A second graph output that takes the same buffer as `present`: attention over a cache that is
            key and value at once writes it twice. "" where there is none. Columns of such a buffer that hold
            no token must hold numbers, whichever: a step multiplies them by 0.
        window: Tokens that a query sees of this state, its own included, where older ones may be left out of
            it; 0 where every token must stay. With "append" what is left out are the first columns.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str, ...]
    update: str
    twin: str = field(default="", metadata={YOUNGER: True})
    window: int = field(default=0, metadata={YOUNGER: True})

    @property
    def column_axis(self) -> int:
        """The axis that grows."""
        return next(i for i, dim in enumerate(self.shape) if dim in (PAST, WINDOW_PAST))

    def sized(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of so many rows and columns."""
        sizes = {BATCH: rows, PAST: columns, WINDOW_PAST: columns}
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)


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
