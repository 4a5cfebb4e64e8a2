"""Figures that are written into the manifest of a package that is already in place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.packages import write_package

from onnxlm import package_swap
from onnxlm.errors import ExportError, PackageError
from onnxlm.manifest import MANIFEST_NAME, read_manifest
from onnxlm.package import check_destination, open_package, record_figures


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXLM_CACHE", str(tmp_path / "cache"))


def test_figures_are_in_the_manifest_and_nothing_else_changes(tmp_path: Path) -> None:
    before = write_package(tmp_path / "x" / "model")
    times = {path: path.stat().st_mtime_ns for path in before.path.iterdir()}
    parity = {"prefill": {"difference": 1e-5, "allowed": 1e-4}}
    returned = record_figures(before.path, quality={"prefill_kl": 0.25}, parity=parity)

    after = open_package(before.path, verify="always")
    assert after.manifest == returned
    assert (after.manifest.quality, after.manifest.parity) == ({"prefill_kl": 0.25}, parity)
    assert after.manifest.files == before.manifest.files
    assert after.digest == before.digest
    changed = [p.name for p in times if p.stat().st_mtime_ns != times[p]]
    assert changed == [MANIFEST_NAME]
    assert set(before.path.iterdir()) == set(times)
    assert [path.name for path in before.path.parent.iterdir()] == ["model"]


def test_what_is_not_given_stays(tmp_path: Path) -> None:
    path = write_package(tmp_path / "model").path
    record_figures(path, quality={"kl": 1.0}, parity={"a": 1})
    record_figures(path, quality={"top1": 0.5})
    assert read_manifest(path).quality == {"top1": 0.5}
    assert read_manifest(path).parity == {"a": 1}
    record_figures(path, parity={})
    assert read_manifest(path).quality == {"top1": 0.5}
    assert read_manifest(path).parity == {}


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
def test_no_number_is_refused_and_leaves_the_manifest(tmp_path: Path, figure: float) -> None:
    path = write_package(tmp_path / "model").path
    text = (path / MANIFEST_NAME).read_bytes()
    with pytest.raises(PackageError, match=r"field 'quality\.kl' is not a finite number"):
        record_figures(path, quality={"kl": figure})
    assert (path / MANIFEST_NAME).read_bytes() == text
    assert not list(path.glob("*.part"))


def test_a_folder_without_a_package(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"onnxlm\.json: cannot be read"):
        record_figures(tmp_path, quality={})
    assert list(tmp_path.iterdir()) == []


def test_another_writer_is_not_disturbed(tmp_path: Path) -> None:
    path = write_package(tmp_path / "model").path
    with (
        package_swap.writer_lock(path),
        pytest.raises(ExportError, match="is being written by another onnxlm process"),
    ):
        record_figures(path, quality={"kl": 1.0})
    assert read_manifest(path).quality == {}


def test_a_disk_that_refuses_leaves_the_old_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_package(tmp_path / "model").path

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ExportError, match=r"onnxlm\.json: cannot be written; found No space left"):
        record_figures(path, quality={"kl": 1.0})
    assert read_manifest(path).quality == {}
    assert not list(path.glob("*.part"))


def test_what_a_killed_process_leaves_is_no_stranger(tmp_path: Path) -> None:
    path = write_package(tmp_path / "model").path
    (path / f"{MANIFEST_NAME}.part").write_text("{")
    check_destination(path)
    record_figures(path, quality={"kl": 1.0})
    assert not list(path.glob("*.part"))
