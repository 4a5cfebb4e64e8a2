"""The token loop: prompts in, one id a row out at each step. Knows nothing of text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxlm.runtime.choosing import TokenChooser
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.speculation import SpeculativeBatch
from onnxlm.runtime.stopping import RowStops


@dataclass
class Timings:
    """Seconds a generation took, filled in while it runs.

    Attributes:
        ttft_s: From the call to the first token, the prompt's run included.
        steps_s: Of each decode step after that.
    """

    ttft_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)


def token_steps(
    batch: Batch | SpeculativeBatch,
    prompts: Sequence[Sequence[int]],
    chooser: TokenChooser,
    stops: RowStops,
    timings: Timings,
    sources: NDArray[np.int64] | None = None,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Run the prompts behind what `batch` holds, then choose tokens until every row has stopped.

    Args:
        batch: The rows' cache. Every chosen token but the last of each row is in it afterwards.
        prompts: New tokens of each row, at least one.
        chooser: Chooses tokens.
        stops: Told of every token; decides which rows go on.
        timings: Filled in.
        sources: Which prompt each row goes on from, int64 [rows]; None where there is one row for each.

    Yields:
        The chosen ids, int64 [rows], and which rows they belong to, bool [rows].
    """
    began = time.perf_counter()
    live = stops.running
    if not live.any():
        return
    if chooser.needs_logits:
        logits = batch.prefill_logits(prompts)
        if sources is not None:
            batch.reorder(sources)
            logits = logits[sources]
        tokens = chooser.choose(logits, live)
    else:
        tokens = batch.prefill_tokens(prompts)
    batch.set_tokens(tokens)
    timings.ttft_s = time.perf_counter() - began
    while True:
        stops.update(tokens)
        yield tokens, live
        live = stops.running
        if not live.any():
            return
        began = time.perf_counter()
        if chooser.needs_logits:
            tokens = chooser.choose(batch.decode_logits(live), live)
            batch.set_tokens(tokens)
        else:  # the step itself puts its tokens where the next one reads them
            tokens = batch.decode_tokens(live)
        timings.steps_s.append(time.perf_counter() - began)
