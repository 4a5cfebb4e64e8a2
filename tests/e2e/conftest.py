"""A tiny checkpoint, the package that the command line makes of it, and the command line itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ran, run_process
from support.tiny import write_source

from onnxlm.cli import main


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command in this process, which has paid for its imports already."""

    def run(*arguments: str | Path) -> Ran:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        code = left.value.code
        return Ran(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder; do not change it."""
    return write_source(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_export(tiny_source: Path) -> Ran:
    """What `onnxlm export` said when it made `tiny_package`."""
    return run_process("export", tiny_source, tiny_source.parent / "package")


@pytest.fixture(scope="session")
def tiny_package(tiny_source: Path, tiny_export: Ran) -> Path:
    """An fp32 package of `tiny_source`; do not change it."""
    assert tiny_export.code == 0, tiny_export.err
    return tiny_source.parent / "package"
