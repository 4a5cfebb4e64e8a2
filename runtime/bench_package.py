"""A package as a contestant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from onnxlm.manifest import Manifest
from onnxlm.runtime.engine import Batch
from onnxlm.runtime.model import LanguageModel, load
from onnxlm.runtime.tokenizer import Tokenizer


@dataclass
class PackageContestant:
    """A package on an execution provider; greedy, and an end-of-text token ends nothing.

    Attributes:
        path: The package's folder.
        provider: Execution provider.
        threads: Threads inside an operator; 0 is all cores.
        allow_fallback: Run on the CPU where the provider cannot.
    """

    path: Path
    provider: str = "cpu"
    threads: int = 0
    allow_fallback: bool = False
    _model: LanguageModel | None = None
    _batch: Batch | None = None

    def prepare(self) -> str:
        """Open the sessions; the provider that the decode session really has."""
        self._model = load(
            self.path,
            self.provider,
            threads=self.threads,
            allow_fallback=self.allow_fallback,
        )
        active: list[str] = self._model.sessions.decode.get_providers()
        return active[0]

    def prefill(self, ids: Sequence[int]) -> None:
        """Run a prompt in a new batch."""
        if self._model is None:
            raise RuntimeError("prefill() without prepare()")
        self._batch = Batch(self._model.sessions, 1)
        self._batch.set_tokens(self._batch.prefill_tokens([ids]))

    def step(self) -> None:
        """One greedy step."""
        if self._batch is None:
            raise RuntimeError("step() without prefill()")
        self._batch.decode_tokens()


def sample_text() -> str:
    """The bundled text that prompts are cut from."""
    return (files("onnxlm.data") / "evaluation.txt").read_text(encoding="utf-8")


def prompt_ids(package: Path, vocab_size: int, length: int) -> list[int]:
    """A prompt of `length` tokens: the bundled text, again and again, in the package's own tokens."""
    ids = Tokenizer.from_folder(package, vocab_size).encode(sample_text())
    return (ids * (length // len(ids) + 1))[:length]


def file_bytes(manifest: Manifest) -> int:
    """Size of the graphs and their weights, without tokenizer and configs."""
    names = {graph.file for graph in manifest.graphs.values()} | {manifest.weights.file}
    return sum(manifest.files[name].bytes for name in names)


def worst_quality(manifest: Manifest) -> dict[str, float]:
    """KL and top-1 of prefill or decode, whichever is worse; empty where the manifest has none."""
    worse = {"kl": max, "top1": min}
    result = {}
    for figure, choose in worse.items():
        found = [v for key, v in manifest.quality.items() if key.rpartition("_")[2] == figure]
        if found:
            result[figure] = choose(found)
    return result
