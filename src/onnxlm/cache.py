"""The user's cache folder: what can be made again at any time."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The folder for caches, which need not exist yet.

    `ONNXLM_CACHE` names it; else it is the platform's own place (`XDG_CACHE_HOME` or ~/.cache on Linux,
    ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows).
    """
    chosen = os.environ.get("ONNXLM_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "onnxlm" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "onnxlm"
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rule: a relative path is to be ignored.
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "onnxlm"
