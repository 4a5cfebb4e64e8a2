"""How well a package foresees a text, and how far it is from another model: the stages put together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxlm.calls import Ids, Reference, Runner, Stream
from onnxlm.errors import InputError
from onnxlm.manifest import is_package
from onnxlm.progress import Progress, silent
from onnxlm.quality import LossMeter, Quality, QualityMeter

if TYPE_CHECKING:
    from pathlib import Path

    from onnxlm.runtime import LanguageModel
    from onnxlm.runtime.text_windows import Window

# Logits of this many positions exist at once.
CHUNK = 64
WINDOW = 1024
# Greedy agreement is measured behind this many pieces of the text, of this many tokens each.
PROMPTS, PROMPT_TOKENS, GREEDY_TOKENS = 8, 32, 64
TAIL = 0.99


@dataclass(frozen=True)
class EvalOptions:
    """What a user may choose.

    Attributes:
        text: Text to run; a bundled one when None.
        against: Another model: a package of any precision, or what `onnxlm.models.load` reads.
        tokens: Tokens of the text at most; all when None.
        window: Tokens that run together; 1024, or the context if that is shorter, when None.
        stride: Tokens from one window's beginning to the next one's; half a window when None.
        provider: Execution provider.
        threads: Threads of the package and of PyTorch; 0 leaves both to choose.
    """

    text: str | None = None
    against: str | None = None
    tokens: int | None = None
    window: int | None = None
    stride: int | None = None
    provider: str = "cpu"
    threads: int = 0


@dataclass(frozen=True)
class GreedyAgreement:
    """How long greedy decoding says what the other model would have said.

    Attributes:
        prompts: Prompts, each a piece of the text.
        tokens: Tokens that greedy decoding put behind each.
        mean: Tokens up to the first other one, over the prompts.
        least: The same of the prompt with the fewest.
    """

    prompts: int
    tokens: int
    mean: float
    least: int


@dataclass(frozen=True)
class Comparison:
    """A package beside another model.

    Attributes:
        against: What the other model is.
        quality: Figures over the same positions.
        kl_p99: KL divergence, nats, that 99% of the positions do not exceed.
        greedy: Agreement of greedy decoding.
    """

    against: str
    quality: Quality
    kl_p99: float
    greedy: GreedyAgreement


@dataclass(frozen=True)
class EvalReport:
    """What was measured.

    Attributes:
        package: The package's folder.
        precision: The package's precision.
        provider: Where it ran.
        text: Where the tokens come from.
        tokens: Tokens predicted, each once.
        windows: Rows that the text was cut into.
        window: Most tokens that a row ran.
        stride: Tokens from one row's beginning to the next one's.
        loss: Mean of -ln p of a token, nats.
        perplexity: Its exponential.
        comparison: The package beside another model, where one was given.
    """

    package: str
    precision: str
    provider: str
    text: str
    tokens: int
    windows: int
    window: int
    stride: int
    loss: float
    perplexity: float
    comparison: Comparison | None = None

    @property
    def ok(self) -> bool:
        """Whether the loss is a number and the package still the model that it was held against."""
        if self.comparison is not None and self.comparison.quality.verdict == "collapsed":
            return False
        return math.isfinite(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """JSON fields; what is no finite number is null."""
        value = dataclasses.asdict(self)
        if self.comparison is not None:
            value["comparison"]["quality"] = self.comparison.quality.to_dict()
        fields: dict[str, Any] = _finite(value)
        return fields


def evaluate(
    path: str | Path, options: EvalOptions | None = None, progress: Progress = silent
) -> EvalReport:
    """Run a text through a package, and through another model beside it if one is named.

    Args:
        path: The package's folder.
        options: See `EvalOptions`.
        progress: Told of the stages.

    Raises:
        PackageError, CheckpointError, ConfigError: The package or the other model is damaged.
        ProviderError: The provider is not available.
        InputError: The text is too short, window or stride is out of its bounds, or the other model has
            another vocabulary.
    """
    from onnxlm.runtime import load
    from onnxlm.runtime.evaluate import PackageRunner
    from onnxlm.runtime.text_windows import strided_windows
    from onnxlm.verification import text_tokens

    chosen = options or EvalOptions()
    progress("load package", 0, 0)
    model = load(path, provider=chosen.provider, threads=chosen.threads)
    manifest = model.package.manifest
    before, ids, text = text_tokens(model, chosen.text, chosen.tokens)
    window, stride = _sizes(chosen, manifest.context_length, len(before))
    rows = strided_windows(ids, before, window, stride)
    runner = PackageRunner(model)
    comparison = None
    if chosen.against is None:
        losses = _losses(runner, rows, progress)
    else:
        progress("load the other model", 0, 0)
        other, kind = _open(chosen.against, model, chosen.threads)
        meter = _compare(other, runner, rows, progress)
        losses = meter.candidate
        comparison = Comparison(
            against=f"{chosen.against} ({kind})",
            quality=meter.result(),
            kl_p99=meter.kl_quantile(TAIL),
            greedy=_greedy(other, runner, before, ids, manifest.context_length, progress),
        )
    return EvalReport(
        package=str(path),
        precision=manifest.precision,
        provider=model.provider,
        text=text,
        tokens=sum(row.scored for row in rows),
        windows=len(rows),
        window=window,
        stride=stride,
        loss=losses.loss,
        perplexity=losses.perplexity,
        comparison=comparison,
    )


def _sizes(options: EvalOptions, context_length: int, before: int) -> tuple[int, int]:
    """Window and stride."""
    window = min(WINDOW, context_length) if options.window is None else options.window
    if not before < window <= context_length:
        raise InputError("the window", found=window, allowed=f"{before + 1} to {context_length}")
    stride = max(1, window // 2) if options.stride is None else options.stride
    return window, stride


def _open(source: str, model: LanguageModel, threads: int) -> tuple[Reference, str]:
    """Another model, and what it is."""
    reference: Reference
    if is_package(source):
        from onnxlm.runtime import load
        from onnxlm.runtime.evaluate import PackageRunner

        other = load(source, threads=threads)
        reference, vocab_size = PackageRunner(other), other.sessions.vocab_size
        kind = f"{other.package.manifest.precision} package"
    else:
        from onnxlm.verification import open_eager

        reference, vocab_size = open_eager(source, threads)
        kind = "PyTorch, fp32"
    if vocab_size != model.sessions.vocab_size:
        raise InputError(
            f"{source}: its tokens are not the package's",
            found=f"a vocabulary of {vocab_size}",
            allowed=model.sessions.vocab_size,
            fix="compare models that share a tokenizer",
        )
    return reference, kind


def _pieces(stream: Stream, row: Window) -> Iterator[tuple[Any, Any]]:
    """(logits [n, V], targets int64 [n]) of the positions of a row that count, piece by piece."""
    start = 0
    for logits in stream.stream(row.ids[:-1], CHUNK):
        end = start + len(logits)
        skip = min(max(0, row.first - start), len(logits))
        if skip < len(logits):
            targets = np.array(row.ids[start + skip + 1 : end + 1], dtype=np.int64)
            yield logits[skip:], targets
        start = end


def _losses(stream: Stream, rows: Sequence[Window], progress: Progress) -> LossMeter:
    meter = LossMeter()
    total = sum(row.scored for row in rows)
    for row in rows:
        for logits, targets in _pieces(stream, row):
            meter.add(logits, targets)
            progress("evaluate", meter.tokens, total)
    return meter


def _compare(
    other: Stream, runner: Stream, rows: Sequence[Window], progress: Progress
) -> QualityMeter:
    meter = QualityMeter()
    total = sum(row.scored for row in rows)
    for row in rows:
        pairs = zip(_pieces(other, row), _pieces(runner, row), strict=True)
        for (theirs, targets), (ours, _) in pairs:
            meter.add(theirs, ours, targets)
            progress("evaluate", meter.tokens, total)
    return meter


def _greedy(
    other: Reference,
    runner: Runner,
    before: Ids,
    ids: Ids,
    context_length: int,
    progress: Progress,
) -> GreedyAgreement:
    """Greedy decoding behind evenly spaced pieces of the text."""
    length = min(PROMPT_TOKENS, len(ids), max(1, context_length - len(before) - 1))
    count = min(GREEDY_TOKENS, context_length - len(before) - length)
    starts = sorted({int(at) for at in np.linspace(0, len(ids) - length, PROMPTS)})
    agreed = []
    for done, start in enumerate(starts):
        progress("greedy decoding", done, len(starts))
        prompt = [*before, *ids[start : start + length]]
        made = runner.greedy(prompt, count)
        wanted = other.logits([*prompt, *made])[len(prompt) - 1 : -1].argmax(-1)
        differs = np.flatnonzero(wanted != np.array(made))
        agreed.append(int(differs[0]) if differs.size else len(made))
    return GreedyAgreement(len(agreed), count, sum(agreed) / len(agreed), min(agreed))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
