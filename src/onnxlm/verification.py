"""A package held against its full-precision model: the stages put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxlm.errors import InputError
from onnxlm.manifest import Manifest, is_package, read_manifest
from onnxlm.progress import Progress, silent
from onnxlm.proof import VerifyReport

if TYPE_CHECKING:
    from onnxlm.calls import Reference
    from onnxlm.runtime.evaluate import PackageRunner
    from onnxlm.runtime.model import LanguageModel

_FULL = ("fp32", "fp16")
_BUNDLED = "bundled evaluation text"
_RANDOM_TOKENS = 1024
_RANDOM = "random token ids, seed 0: no tokenizer here spells the bundled text"


@dataclass(frozen=True)
class VerifyOptions:
    """What a user may choose.

    Attributes:
        reference: The full-precision model: what `onnxlm.models.load` reads. The source that the package
            names when None.
        text: Text to run; a bundled one when None.
        tokens: Tokens of it that quality is measured on.
        provider: Execution provider.
        threads: Threads of the package and of PyTorch; 0 leaves both to choose.
    """

    reference: str | None = None
    text: str | None = None
    tokens: int = 1024
    provider: str = "cpu"
    threads: int = 0


def verify(
    path: str | Path, options: VerifyOptions | None = None, progress: Progress = silent
) -> VerifyReport:
    """Prove a package: parity with the eager model in fp32 and fp16, quality in all that is below fp32.

    Quality against a package takes no torch.

    Args:
        path: The package's folder.
        options: See `VerifyOptions`.
        progress: Told of the stages.

    Raises:
        PackageError, CheckpointError, ConfigError: The package or the reference is damaged.
        ProviderError: The provider is not available.
        InputError: There is no reference, it is another model, or the text is too short.
    """
    from onnxlm.runtime import load
    from onnxlm.runtime.evaluate import PackageRunner
    from onnxlm.runtime.session import SessionConfig

    chosen = options or VerifyOptions()
    progress("load package", 0, 0)
    model = load(path, provider=chosen.provider, threads=chosen.threads)
    manifest = model.package.manifest
    source = chosen.reference or _named_source(path, manifest)
    progress("load reference", 0, 0)
    full = manifest.precision in _FULL
    reference, kind = _open_reference(source, manifest, chosen, eager=full)
    runner = PackageRunner(model, SessionConfig(provider=chosen.provider, threads=chosen.threads))
    report = VerifyReport(
        package=str(path),
        reference=f"{source} ({kind})",
        precision=manifest.precision,
        lowering=manifest.lowering,
        provider=model.sessions.decode.get_providers()[0].removesuffix("ExecutionProvider"),
        text="",
    )
    if full:
        report = _with_parity(report, model, runner, reference, chosen, progress)
    if manifest.precision != "fp32":
        report = _with_quality(report, model, runner, reference, chosen, progress)
    return report


def _named_source(path: str | Path, manifest: Manifest) -> str:
    source = manifest.source.get("path")
    if manifest.source.get("kind") == "module":
        return str(source)  # spelled as file.py:function@weights; its reader says what is missing
    if not isinstance(source, str) or not Path(source).exists():
        raise InputError(
            f"{path}: the model it was made from is not there",
            found=source,
            fix="name it with --reference",
        )
    return source


def _open_reference(
    source: str, manifest: Manifest, options: VerifyOptions, eager: bool
) -> tuple[Reference, str]:
    """The reference and what it is; a package runs as it is unless the eager model is asked for."""
    reference: Reference
    if is_package(source) and not eager:
        from onnxlm.runtime import load
        from onnxlm.runtime.evaluate import PackageRunner

        own = read_manifest(source)
        if own.precision not in _FULL:
            raise InputError(
                f"{source}: is no reference", found=own.precision, allowed=", ".join(_FULL)
            )
        # Seldom run again: its weights stay as they are mapped, one copy for both graphs.
        unpacked = {"session.disable_prepacking": "1"}
        opened = load(source, threads=options.threads, packed=False, options=unpacked)
        reference, vocab_size = PackageRunner(opened), own.vocab_size
        kind = f"{own.precision} package"
    else:
        reference, vocab_size = open_eager(source, options.threads)
        kind = "PyTorch, fp32"
    if vocab_size != manifest.vocab_size:
        raise InputError(
            f"{source}: is another model than the package's",
            found=f"a vocabulary of {vocab_size}",
            allowed=manifest.vocab_size,
            fix="name the model that the package was made from with --reference",
        )
    return reference, kind


def open_eager(source: str, threads: int) -> tuple[Reference, int]:
    """The eager model in PyTorch, fp32, and its vocabulary's size.

    Args:
        source: What `onnxlm.models.load` reads.
        threads: Threads of PyTorch; 0 leaves it to choose.
    """
    import torch

    from onnxlm.export.reference import EagerReference
    from onnxlm.models import load as load_eager

    if threads:
        torch.set_num_threads(threads)
    model = load_eager(source)
    return EagerReference(model), model.lm_head.out_features


def _with_parity(
    report: VerifyReport,
    model: LanguageModel,
    runner: PackageRunner,
    reference: Reference,
    options: VerifyOptions,
    progress: Progress,
) -> VerifyReport:
    from onnxlm.export.verify import check_parity, tokens_wanted

    wanted = tokens_wanted(model.package.manifest.context_length)
    before, ids, text = text_tokens(model, options.text, wanted)
    given = [*before, *ids][:wanted]
    checks, divergence = check_parity(runner, reference, model.package, given, progress)
    return replace(report, checks=tuple(checks), divergence=divergence, text=text)


def _with_quality(
    report: VerifyReport,
    model: LanguageModel,
    runner: PackageRunner,
    reference: Reference,
    options: VerifyOptions,
    progress: Progress,
) -> VerifyReport:
    from onnxlm.runtime.evaluate import measure_quality, windows

    before, ids, text = text_tokens(model, options.text, options.tokens + 1)
    rows = windows(ids, before, model.package.manifest.context_length)
    return replace(
        report, quality=measure_quality(reference, runner, rows, progress=progress), text=text
    )


def text_tokens(
    model: LanguageModel, given: str | None, count: int | None
) -> tuple[list[int], list[int], str]:
    """What begins a text, the first tokens of the text to run, and what it is.

    Args:
        model: Whose tokens.
        given: The text; a bundled one when None.
        count: Most tokens; all when None.

    Raises:
        InputError: The vocabulary cannot spell the text.
    """
    from onnxlm.runtime.evaluate import start_of_text

    text = given
    if text is None:
        text = resources.files("onnxlm.data").joinpath("evaluation.txt").read_text(encoding="utf-8")
    try:
        ids = model.tokenizer.encode(text, add_special_tokens=False)
    except InputError:
        if given is not None:
            raise
        vocab_size = model.package.manifest.vocab_size
        drawn = np.random.default_rng(0).integers(0, vocab_size, count or _RANDOM_TOKENS)
        return [], drawn.tolist(), _RANDOM
    return start_of_text(model.tokenizer), ids[:count], "given text" if given else _BUNDLED
