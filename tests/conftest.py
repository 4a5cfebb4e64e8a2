"""Fixtures and the report header of the whole suite."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

SMOLLM2 = Path(__file__).parents[1] / ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start: a shell's background job ignores it, and so would its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    import onnxruntime

    names = ("torch", "onnx", "onnxruntime", "transformers")
    return [
        ", ".join(f"{name} {_version(name)}" for name in names),
        f"execution providers: {', '.join(onnxruntime.get_available_providers())}",
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, an export that many tests look at is made in one of them."""
    from support.scheduling import FamilyScheduling

    return FamilyScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests pack does not go to the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXLM_CACHE", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF file (Q4_1); the test is skipped where it is absent."""
    path = Path(os.environ.get("ONNXLM_SMOLLM2", SMOLLM2))
    if not path.is_file():
        pytest.skip(f"{path} is absent: run `make model` or set ONNXLM_SMOLLM2")
    return path
