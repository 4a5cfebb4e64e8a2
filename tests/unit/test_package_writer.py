"""Writing a package: whole or not at all, whatever happens on the way."""
# ruff: noqa: PT012 (what is tested is a context manager)

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.packages import EMPTY_MODEL, sample_manifest, write_package

from onnxlm import package_swap
from onnxlm.errors import ExportError, PackageError
from onnxlm.package import PackageWriter, check_destination, open_package


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXLM_CACHE", str(tmp_path / "cache"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def mark(path: Path) -> str:
    """The mark of a package all of whose files were hashed and belong together."""
    package = open_package(path, verify="always")
    written = package.read_json("config.json")["mark"]
    assert package.manifest.source == {"mark": written}
    return str(written)


def test_nothing_but_the_package_remains(tmp_path: Path) -> None:
    package = write_package(tmp_path / "out" / "deep" / "model", mark="a")
    assert names(tmp_path / "out" / "deep") == ["model"]
    assert names(package.path) == [
        "config.json",
        "decode.onnx",
        "model.onnx_data",
        "onnxlm.json",
        "prefill.onnx",
    ]
    assert mark(package.path) == "a"


def test_re_export_keeps_the_size(tmp_path: Path) -> None:
    sizes = set()
    for turn in "abc":
        write_package(tmp_path / "x" / "model", mark=turn)
        assert mark(tmp_path / "x" / "model") == turn
        sizes.add(folder_bytes(tmp_path / "x"))
    assert len(sizes) == 1
    assert names(tmp_path / "x") == ["model"]


def test_the_old_package_is_whole_until_the_new_one_is(tmp_path: Path) -> None:
    write_package(tmp_path / "model", mark="old")
    with PackageWriter(tmp_path / "model") as writer:
        for name in ("prefill.onnx", "decode.onnx"):
            (writer.path / name).write_bytes(EMPTY_MODEL)
        (writer.path / "model.onnx_data").write_bytes(b"new")
        assert mark(tmp_path / "model") == "old"
        writer.finish(sample_manifest())
        assert open_package(tmp_path / "model").weights_path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("before", [False, True])
def test_an_exception_leaves_what_was(tmp_path: Path, error: BaseException, before: bool) -> None:
    place = tmp_path / "x"
    if before:
        write_package(place / "model", mark="old")
    with pytest.raises(type(error)), PackageWriter(place / "model") as writer:
        (writer.path / "model.onnx_data").write_bytes(b"half")
        raise error
    if before:
        assert names(place) == ["model"]
        assert mark(place / "model") == "old"
    else:
        assert not place.exists()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(ExportError, match=r"model: cannot be written; found No space left"),
        PackageWriter(tmp_path / "model"),
    ):
        raise full


def test_a_manifest_that_contradicts_the_files(tmp_path: Path) -> None:
    with (
        pytest.raises(PackageError, match=r"'graphs.prefill.file' is not in 'files'"),
        PackageWriter(tmp_path / "model") as writer,
    ):
        (writer.path / "model.onnx_data").write_bytes(b"w")
        writer.finish(sample_manifest())
    assert names(tmp_path) == []


def test_a_writer_without_finish_is_a_fault_of_the_program(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="without a call of finish"),
        PackageWriter(tmp_path / "model"),
    ):
        pass


def test_a_link_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    with (
        pytest.raises(PackageError, match="a symbolic link"),
        PackageWriter(tmp_path / "model") as writer,
    ):
        (writer.path / "link").symlink_to(tmp_path / "outside")
        writer.finish(sample_manifest())


def test_destinations_that_are_taken(tmp_path: Path) -> None:
    check_destination(tmp_path / "a" / "b" / "new")
    (tmp_path / "empty").mkdir()
    check_destination(tmp_path / "empty")
    assert not (tmp_path / "a").exists()

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(
        ExportError, match=r"full: is a non-empty folder that is no package; found thesis\.tex"
    ):
        check_destination(tmp_path / "full")
    with pytest.raises(ExportError, match=r"thesis\.tex: is a file; allowed: "):
        check_destination(tmp_path / "full" / "thesis.tex")
    with pytest.raises(ExportError, match=r"cannot be made; found .*thesis\.tex is a file"):
        check_destination(tmp_path / "full" / "thesis.tex" / "model")
    assert (tmp_path / "full" / "thesis.tex").read_text() == "x"


def test_only_what_was_written_here_is_replaced(tmp_path: Path) -> None:
    package = write_package(tmp_path / "model", mark="old")
    (package.path / ".DS_Store").write_bytes(b"")
    check_destination(package.path)
    (package.path / "notes.txt").write_text("mine")
    with pytest.raises(
        ExportError, match=r"no part of the package there, .* found notes\.txt; move them"
    ):
        write_package(tmp_path / "model")
    assert (package.path / "notes.txt").read_text() == "mine"
    (package.path / "notes.txt").unlink()
    (package.path / "onnxlm.json").write_text("{}")
    with pytest.raises(
        ExportError, match=r"a package that cannot be read, .*; delete the folder first"
    ):
        write_package(tmp_path / "model")


def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="is the current folder"):
        check_destination(".")
    with pytest.raises(ExportError, match="root"):
        check_destination("/")


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)  # the tests may run as root, whom no mode stops
    with pytest.raises(
        ExportError, match="model: cannot be written; found Permission denied; choose"
    ):
        check_destination(tmp_path / "model")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user whom modes stop")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ExportError, match="cannot be written"):
        check_destination(tmp_path / "locked" / "model")


def test_a_link_to_a_package_is_followed(tmp_path: Path) -> None:
    write_package(tmp_path / "real", mark="old")
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    write_package(tmp_path / "link", mark="new")
    assert (tmp_path / "link").is_symlink()
    assert mark(tmp_path / "real") == "new"


def kill_between_renames(place: Path, *, whole: bool) -> None:
    """What a kill leaves after the old package moved aside (whole: and the new one was complete)."""
    write_package(place / "model", mark="old")
    write_package(place / "next", mark="new")
    os.rename(place / "model", place / ".model.old-1-aa")
    os.rename(place / "next", place / ".model.tmp-1-aa")
    if not whole:
        (place / ".model.tmp-1-aa" / "onnxlm.json").unlink()


@pytest.mark.parametrize(("whole", "expected"), [(True, "new"), (False, "old")])
def test_a_reader_finishes_the_work_of_a_killed_writer(
    tmp_path: Path, whole: bool, expected: str
) -> None:
    kill_between_renames(tmp_path, whole=whole)
    assert mark(tmp_path / "model") == expected
    assert names(tmp_path) == ["model"]


def test_the_next_writer_recovers_before_it_can_fail(tmp_path: Path) -> None:
    kill_between_renames(tmp_path, whole=False)
    with pytest.raises(ValueError, match="x"), PackageWriter(tmp_path / "model"):
        raise ValueError("x")
    assert names(tmp_path) == ["model"]
    assert mark(tmp_path / "model") == "old"


def test_a_half_deleted_old_package_is_not_taken_for_whole(tmp_path: Path) -> None:
    kill_between_renames(tmp_path, whole=False)
    (tmp_path / ".model.old-1-aa" / "onnxlm.json").unlink()
    with pytest.raises(PackageError, match="no such folder"):
        open_package(tmp_path / "model")


def test_leftovers_of_other_packages_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / ".model2.tmp-1-aa").mkdir()
    write_package(tmp_path / "model")
    assert names(tmp_path) == [".model2.tmp-1-aa", "model"]


def test_a_failed_rename_puts_the_old_package_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path / "model", mark="old")
    real = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".tmp-" in Path(source).name:
            raise PermissionError(errno.EACCES, "The file is in use")
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(
        ExportError, match=r"model: cannot be replaced; found The file is in use; close"
    ):
        write_package(tmp_path / "model", mark="new")
    assert mark(tmp_path / "model") == "old"
    assert names(tmp_path) == ["model"]


def test_two_writers_of_one_destination(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="finish"), PackageWriter(tmp_path / "model") as first:
        with (
            pytest.raises(
                ExportError, match="is being written by another onnxlm process; wait for it"
            ),
            PackageWriter(tmp_path / "model"),
        ):
            pass
        assert first.path.is_dir()
    assert names(tmp_path) == []


def test_a_reader_waits_for_a_live_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renames of a live writer a reader neither fails nor moves anything."""
    write_package(tmp_path / "model", mark="old")
    real = package_swap.leftovers
    asked = []

    with package_swap.writer_lock(tmp_path / "model"):
        os.rename(tmp_path / "model", tmp_path / ".model.old-1-aa")

        def ask(destination: Path) -> tuple[list[Path], list[Path]]:
            asked.append(destination)
            if len(asked) == 3:  # the writer goes on
                os.rename(tmp_path / ".model.old-1-aa", tmp_path / "model")
            return real(destination)

        monkeypatch.setattr(package_swap, "leftovers", ask)
        assert mark(tmp_path / "model") == "old"
    assert len(asked) == 3


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from support.packages import write_package
print("ready", flush=True)
turn = 0
while True:
    turn += 1
    write_package(Path(sys.argv[1]), bytes([turn % 256]) * 20000, mark=f"{sys.argv[2]}-{turn}")
"""


def test_kill_at_random_moments(tmp_path: Path) -> None:
    """A process that re-exports without end is killed: there is always one whole package."""
    place = tmp_path / "x" / "model"
    began = time.perf_counter()
    for mark_before in ("one", "two", "first"):
        write_package(place, b"w" * 20000, mark=mark_before)
    one_write_s = (time.perf_counter() - began) / 3
    size = folder_bytes(place)
    rng = random.Random(7)
    before, changed = "first", 0
    for turn in range(12):
        command = [sys.executable, "-c", WRITE_FOR_EVER, str(place), str(turn)]
        with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0.0, 5 * one_write_s))
            process.kill()
        after = mark(place)
        assert after == before or after.startswith(f"{turn}-")
        changed += after != before
        before = after
    assert changed >= 3
    write_package(place, b"w" * 20000, mark="first")
    assert names(place.parent) == ["model"]
    assert folder_bytes(place.parent) == size


DIE_AT_EVERY_STEP = """
import os, sys
from pathlib import Path
from support.packages import write_package
from onnxlm.package import open_package

place = Path(sys.argv[1])
steps = 0

def die_at(last):
    def hook(event, arguments):
        global steps
        if event in STEPS and armed and str(place.parent) in str(arguments[0]):
            steps += 1
            if steps == last:
                os._exit(9)
    sys.addaudithook(hook)

STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"}
armed = False
last = 0
while True:
    last += 1
    write_package(place, b"o" * 100, mark="old")
    child = os.fork()
    if child == 0:
        die_at(last)
        armed = True
        write_package(place, b"n" * 100, mark="new")
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    package = open_package(place, verify="always")
    assert package.manifest.source == package.read_json("config.json"), last
    print(died, package.manifest.source["mark"], flush=True)
    if died == 0:
        break
    assert died == 9, died
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_death_at_every_step(tmp_path: Path) -> None:
    """A re-export that dies before its n-th system call on a file, for every n, leaves old or new."""
    place = tmp_path / "x" / "model"
    command = [sys.executable, "-c", DIE_AT_EVERY_STEP, str(place)]
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) > 25
    marks = [line.split()[1] for line in lines]
    turned = marks.index("new")
    assert marks == ["old"] * turned + ["new"] * (len(marks) - turned)
    assert 0 < turned < len(marks) - 1  # the old package's deletion can be cut short, too
    assert names(place.parent) == ["model"]


def child_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
