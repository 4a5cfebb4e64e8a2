"""Opening a package: damage, stamps and links."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.packages import write_package

from onnxlm import integrity
from onnxlm.cache import cache_dir
from onnxlm.errors import PackageError
from onnxlm.manifest import MANIFEST_NAME
from onnxlm.package import Package, open_package


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """A package whose files have rested long enough for a stamp."""
    package = write_package(tmp_path / "model")
    for name in package.manifest.files:
        os.utime(package.path / name, (1e9, 1e9))
    return package


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed, in order."""
    names: list[str] = []

    def spy(path: Path) -> object:
        names.append(path.name)
        return real(path)

    real = integrity.hash_file
    monkeypatch.setattr(integrity, "hash_file", spy)
    return names


def test_opened_package(package: Package) -> None:
    opened = open_package(package.path)
    assert opened == package
    assert opened.graph_path("decode") == package.path / "decode.onnx"
    assert opened.weights_path.read_bytes() == b"w" * 1000
    assert opened.read_json("config.json") == {"mark": ""}
    assert opened.has("config.json")
    assert not opened.has("onnxlm.json")
    with pytest.raises(PackageError, match=r"found 'encoder'; allowed: prefill, decode"):
        opened.graph_path("encoder")
    with pytest.raises(PackageError, match=r"vocab\.json: is not a file of this package"):
        opened.read_json("vocab.json")


def test_digest_depends_on_every_byte(tmp_path: Path) -> None:
    one = write_package(tmp_path / "a", b"w" * 1000).digest
    assert write_package(tmp_path / "b", b"w" * 1000).digest == one
    assert write_package(tmp_path / "c", b"w" * 999 + b"x").digest != one


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")


def to_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1000\n")


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"is not the file that the manifest lists; found 999 bytes; allowed: 1000 bytes"),
        (grow, r"is not the file that the manifest lists; found 1001 bytes; allowed: 1000 bytes"),
        (
            flip_last_byte,
            r"is not .*; found SHA-256 [0-9a-f]{64}; allowed: SHA-256 [0-9a-f]{64}; copy or export",
        ),
        (to_pointer, r"is a Git LFS pointer, not the data; found \d+ bytes; .* `git lfs pull`"),
        (Path.unlink, r"cannot be read; found No such file or directory; copy the package again"),
    ],
)
@pytest.mark.parametrize("stamped", [False, True])
def test_damage(
    package: Package, damage: Callable[[Path], None], message: str, stamped: bool
) -> None:
    if stamped:
        open_package(package.path)
    damage(package.weights_path)
    for _ in range(2):  # a failure leaves no stamp behind
        with pytest.raises(PackageError, match=rf"model\.onnx_data: {message}"):
            open_package(package.path)


def test_pointer_of_the_right_size(tmp_path: Path) -> None:
    package = write_package(tmp_path / "model", b"w" * 100)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 100\n"
    package.weights_path.write_bytes(pointer.ljust(100))
    with pytest.raises(PackageError, match="is a Git LFS pointer"):
        open_package(package.path)


def test_a_verified_package_is_not_hashed_again(package: Package, hashed: list[str]) -> None:
    open_package(package.path)
    assert sorted(hashed) == sorted(package.manifest.files)
    hashed.clear()
    open_package(package.path)
    assert hashed == []
    open_package(package.path, verify="always")
    assert sorted(hashed) == sorted(package.manifest.files)


def test_only_the_changed_file_is_hashed_again(package: Package, hashed: list[str]) -> None:
    open_package(package.path)
    hashed.clear()
    os.utime(package.weights_path, (1.1e9, 1.1e9))
    open_package(package.path)
    assert hashed == ["model.onnx_data"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no change time")
def test_a_change_with_its_time_put_back_is_seen(package: Package) -> None:
    open_package(package.path)
    before = package.weights_path.stat()
    flip_last_byte(package.weights_path)
    os.utime(package.weights_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(PackageError, match="SHA-256"):
        open_package(package.path)


def test_files_still_warm_get_no_stamp(tmp_path: Path, hashed: list[str]) -> None:
    package = write_package(tmp_path / "model")
    open_package(package.path)
    hashed.clear()
    open_package(package.path)
    assert sorted(hashed) == sorted(package.manifest.files)


def test_never_hashes_nothing_but_sees_a_cut(package: Package, hashed: list[str]) -> None:
    flip_last_byte(package.weights_path)
    open_package(package.path, verify="never")
    assert hashed == []
    cut(package.weights_path)
    with pytest.raises(PackageError, match="found 999 bytes"):
        open_package(package.path, verify="never")


def test_a_trusting_open_makes_no_stamp(package: Package) -> None:
    flip_last_byte(package.weights_path)
    os.utime(package.weights_path, (1e9, 1e9))
    open_package(package.path, verify="never")
    with pytest.raises(PackageError, match="SHA-256"):
        open_package(package.path)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"files": 3}', '{"files": {"model.onnx_data": [1]}}']
)
def test_a_damaged_stamp_costs_a_hash(package: Package, hashed: list[str], content: str) -> None:
    open_package(package.path)
    (stamp,) = (cache_dir() / "verified").iterdir()
    stamp.write_text(content)
    hashed.clear()
    open_package(package.path)
    assert "model.onnx_data" in hashed


def test_a_cache_that_cannot_be_written(package: Package, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    assert open_package(package.path) == package


def test_a_stamp_of_another_hash_vouches_for_nothing(package: Package) -> None:
    open_package(package.path)
    manifest = package.path / MANIFEST_NAME
    value = json.loads(manifest.read_text())
    value["files"]["model.onnx_data"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(value))
    with pytest.raises(PackageError, match=f"allowed: SHA-256 {'0' * 64}"):
        open_package(package.path)


def replace_by_symlink(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def replace_by_hard_link(path: Path, target: Path) -> None:
    path.unlink()
    path.hardlink_to(target)


@pytest.mark.parametrize(
    ("link", "kind"),
    [(replace_by_symlink, "a symbolic link"), (replace_by_hard_link, "a hard link")],
)
def test_links_are_refused(
    package: Package, tmp_path: Path, link: Callable[[Path, Path], None], kind: str
) -> None:
    outside = tmp_path / "same-bytes"
    outside.write_bytes(package.weights_path.read_bytes())
    link(package.weights_path, outside)
    for verify in ("auto", "always", "never"):
        with pytest.raises(
            PackageError, match=rf"model\.onnx_data: is no file of its own; found {kind}"
        ):
            open_package(package.path, verify=verify)


def test_a_folder_in_the_place_of_a_file(package: Package) -> None:
    package.weights_path.unlink()
    package.weights_path.mkdir()
    with pytest.raises(PackageError, match=r"model\.onnx_data: is no regular file"):
        open_package(package.path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(package: Package) -> None:
    package.weights_path.unlink()
    os.mkfifo(package.weights_path)
    with pytest.raises(PackageError, match="is no regular file"):
        open_package(package.path)


def test_what_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"nothing: is no package; found no such folder"):
        open_package(tmp_path / "nothing")
    with pytest.raises(PackageError, match=r"is no package; found a folder without onnxlm\.json"):
        open_package(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(PackageError, match=r"file: is no package"):
        open_package(tmp_path / "file")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ONNXLM_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/onnxlm"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/onnxlm"),
        ({}, "/home/me/.cache/onnxlm"),
    ],
)
def test_cache_folder_on_linux(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("ONNXLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir().as_posix() == expected
