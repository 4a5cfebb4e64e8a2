"""Fixtures and the report header of the whole suite."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

SMOLLM2 = Path(__file__).parents[1] / ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def pytest_report_header() -> list[str]:
    import onnxruntime

    names = ("torch", "onnx", "onnxruntime", "transformers")
    return [
        ", ".join(f"{name} {_version(name)}" for name in names),
        f"execution providers: {', '.join(onnxruntime.get_available_providers())}",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, what shares an export or a fixture runs in one: it is made once a process."""
    if not items or not items[0].config.pluginmanager.has_plugin("xdist"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_family(item) or item.path.stem))


def _family(item: pytest.Item) -> str | None:
    """The model family that a test is about: its parameter `family`, or the first of its `case` or `key`."""
    call = getattr(item, "callspec", None)
    if call is None:
        return None
    key = call.params.get("case", call.params.get("key"))
    found = call.params.get("family", key[0] if isinstance(key, tuple) else None)
    return found if isinstance(found, str) else None


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF file (Q4_1); the test is skipped where it is absent."""
    path = Path(os.environ.get("ONNXLM_SMOLLM2", SMOLLM2))
    if not path.is_file():
        pytest.skip(f"{path} is absent: run `make model` or set ONNXLM_SMOLLM2")
    return path
