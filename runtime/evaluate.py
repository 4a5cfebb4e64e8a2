"""A package over given tokens: what a proof asks for, and quality figures through both of its graphs.

Shapes: B rows, S new tokens a row, n positions, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxlm import io_spec
from onnxlm.calls import Calls, Floats, Ids, Runner, Stream
from onnxlm.progress import Progress, silent
from onnxlm.quality import Quality, QualityMeter
from onnxlm.runtime.choosing import TokenChooser
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.model import LanguageModel
from onnxlm.runtime.session import SessionConfig, session_options
from onnxlm.runtime.stopping import RowLimits, RowStops
from onnxlm.runtime.text_windows import strided_windows
from onnxlm.runtime.token_loop import Timings, token_steps
from onnxlm.runtime.tokenizer import Tokenizer

# Each window starts with an empty cache; within it, logits of this many positions exist at once.
WINDOW, CHUNK = 1024, 64

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


class PackageRunner:
    """Runs an opened package over given tokens, through the cache and the loop that generation uses.

    Args:
        model: The package.
        config: What its sessions were opened with.
    """

    def __init__(self, model: LanguageModel, config: SessionConfig | None = None) -> None:
        self._model = model
        self._sessions = model.sessions
        self._config = SessionConfig() if config is None else config

    def run(self, calls: Calls) -> list[Floats]:
        """As `onnxlm.calls.Runner` says."""
        batch = Batch(self._sessions, calls.rows)
        kept: list[list[Floats]] = [[] for _ in range(calls.rows)]
        for chunk in calls.chunks:
            if calls.rows == 1:
                kept[0].append(batch.prefill_all_logits(chunk[0]))
            else:
                for row, logits in enumerate(batch.prefill_logits(chunk)):
                    kept[row].append(logits[None])
        for step in calls.steps:
            for row, logits in enumerate(_decode(batch, step)):
                kept[row].append(logits[None])
        return [np.concatenate(parts) for parts in kept]

    def greedy(self, ids: Ids, count: int) -> list[int]:
        """As `onnxlm.calls.Runner` says."""
        batch = Batch(self._sessions, 1)
        stops = RowStops([RowLimits(self._sessions.context_length - len(ids), count)])
        steps = token_steps(batch, [ids], TokenChooser.greedy(), stops, Timings())
        return [int(tokens[0]) for tokens, _ in steps]

    def logits(self, ids: Ids) -> Floats:
        """Logits behind every token of a row, [n, V]."""
        return self._model.logits(ids)

    def hidden(self, ids: Ids) -> None:
        """Nothing: a graph gives out no hidden states."""

    def stream(self, ids: Ids, chunk: int) -> Iterator[Floats]:
        """As `onnxlm.calls.Stream` says, through the prefill graph."""
        batch = Batch(self._sessions, 1)
        for start in range(0, len(ids), chunk):
            yield batch.prefill_all_logits(ids[start : start + chunk])

    def stream_decode(self, ids: Ids, chunk: int) -> Iterator[Floats]:
        """As `onnxlm.calls.Runner` says."""
        batch = Batch(self._sessions, 1)
        yield batch.prefill_all_logits(ids[:chunk])
        for start in range(chunk, len(ids), chunk):
            part = ids[start : start + chunk]
            yield np.concatenate([_decode(batch, (token,)) for token in part])

    def values(
        self, calls: Calls, probe: bytes, names: Sequence[str]
    ) -> list[Mapping[str, Floats]]:
        """As `onnxlm.calls.Runner` says."""
        batch = Batch(self._sessions, calls.rows)
        for chunk in calls.chunks if calls.steps else calls.chunks[:-1]:
            batch.prefill_logits(chunk)
        for step in calls.steps[:-1]:
            _decode(batch, step)
        outputs = self._open(probe).run(list(names), _feeds(batch, calls))
        # Kept logits of a padded row end at its last token, all other values begin at its first.
        return [
            {
                name: output[row, -size:] if name == io_spec.LOGITS else output[row, :size]
                for name, output in zip(names, outputs, strict=True)
            }
            for row, size in enumerate(map(calls.last, range(calls.rows)))
        ]

    def _open(self, probe: bytes) -> ort.InferenceSession:
        """A session of a graph that is not on disk, over the package's weights, where the model runs."""
        options = session_options(self._config)
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(self._model.package.path))
        model = self._sessions.prefill
        settings = model.get_provider_options()
        providers = [(name, settings[name]) for name in model.get_providers()]
        return ort.InferenceSession(probe, options, providers=providers)


def _decode(batch: Batch, tokens: Sequence[int]) -> Floats:
    """Logits behind one given token a row, [B, V], that stay when the next step runs."""
    batch.set_tokens(tokens)
    return batch.decode_logits().copy()


def _feeds(batch: Batch, calls: Calls) -> dict[str, NDArray[Any]]:
    """Every input of the last call, `batch` holding what the calls before it left."""
    if calls.steps:
        return batch.inputs([(token,) for token in calls.steps[-1]], calls.graph)
    longest = max(map(len, calls.chunks[-1]))
    kept = np.array(longest, dtype=np.int64)
    return {**batch.inputs(calls.chunks[-1]), io_spec.LOGITS_TO_KEEP: kept}


def start_of_text(tokenizer: Tokenizer) -> list[int]:
    """The BOS token where the tokenizer begins every text with one."""
    first = tokenizer.encode("")[:1]
    return first if first == [tokenizer.bos_token_id] else []


def windows(ids: Ids, before: Ids, context_length: int) -> list[Ids]:
    """Cut the tokens of a text into rows for `measure_quality`, side by side.

    Args:
        ids: Tokens of the text.
        before: What every row begins with.
        context_length: Most positions of a row.

    Raises:
        InputError: There are fewer than two tokens.
    """
    size = min(WINDOW, context_length)
    return [row.ids for row in strided_windows(ids, before, size, size - len(before))]


def measure_quality(
    reference: Stream,
    candidate: Runner,
    rows: Sequence[Ids],
    decode_tokens: int = 256,
    progress: Progress = silent,
) -> dict[str, Quality]:
    """Compare next-token distributions over given rows, through prefill and through decode.

    Args:
        reference: The full-precision model.
        candidate: The package.
        rows: From `windows`: token ids of one row, the last only predicted.
        decode_tokens: Decode steps at most; all in the first row.
        progress: Told of positions compared.

    Returns:
        Figures by the path they came through, "prefill" and "decode"; the second only where the first row
        is longer than the chunk that is prefilled before it.
    """
    meter = QualityMeter()
    total = sum(len(row) - 1 for row in rows)
    for row in rows:
        streams = (reference.stream(row[:-1], CHUNK), candidate.stream(row[:-1], CHUNK))
        for _ in _compare(meter, row, 0, *streams):
            progress("compare prefill", meter.tokens, total)
    figures = {io_spec.PREFILL: meter.result()}
    chunk = min(CHUNK, len(rows[0]) // 2)
    row = rows[0][: chunk + decode_tokens + 1]
    if chunk and len(row) > chunk + 1:
        meter = QualityMeter()
        streams = (reference.stream(row[:-1], chunk), candidate.stream_decode(row[:-1], chunk))
        for _ in _compare(meter, row, 1, *streams):
            progress("compare decode", meter.tokens, len(row) - 1 - chunk)
        figures[io_spec.DECODE] = meter.result()
    return figures


def _compare(
    meter: QualityMeter,
    row: Ids,
    skip: int,
    reference: Iterator[Floats],
    candidate: Iterator[Floats],
) -> Iterator[None]:
    """Give the meter all pieces but the first `skip`, beside the tokens that follow; one piece a turn."""
    done = 0
    for index, (ours, theirs) in enumerate(zip(reference, candidate, strict=True)):
        if index >= skip:
            targets = row[done + 1 : done + 1 + len(ours)]
            meter.add(ours, theirs, np.array(targets, dtype=np.int64))
        done += len(ours)
        yield
