"""Guides for contributors name files, functions and classes that are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted(file.name for file in (ROOT / "docs").glob("add-a*.md"))
SOURCES = ("src", "models", "export", "quantize", "runtime", "tests")
PATH = re.compile(r"[\w./]+/[\w.]*|_?\w+\.(py|md|json)")
NAME = re.compile(r"(?:\w+\.)*(\w+)(?:\(.*\))?")


def quoted(guide: str) -> set[str]:
    """What stands between backquotes, placeholders left out."""
    text = (ROOT / "docs" / guide).read_text(encoding="utf-8")
    found = re.findall(r"`([^`\n]+)`", text)
    return {item for item in found if not set(item) & set("<> {}[]")}


@cache
def words() -> frozenset[str]:
    """Every word of every source file but this one."""
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    texts = (file.read_text(encoding="utf-8") for file in files if file != Path(__file__))
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


@cache
def paths() -> tuple[str, ...]:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*")]
    return tuple(f"/{file.relative_to(ROOT).as_posix()}" for file in files)


@pytest.mark.parametrize("guide", GUIDES)
def test_everything_named_is_there(guide: str) -> None:
    missing = []
    for item in quoted(guide):
        if PATH.fullmatch(item):
            if not any(path.endswith(f"/{item.rstrip('/')}") for path in paths()):
                missing.append(item)
        elif (match := NAME.fullmatch(item)) and match[1] not in words():
            missing.append(item)
    assert missing == []
    assert quoted(guide)
