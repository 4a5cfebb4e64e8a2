"""What a user sees when something goes wrong: one line and an exit code, and no chatter of libraries."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from onnxlm.errors import OnnxlmError, OnnxlmWarning

DEBUG = "ONNXLM_DEBUG"
BUG, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143

# Libraries of the "export" extra, by import name.
_EXPORT_EXTRA = frozenset(
    {
        "gguf",
        "huggingface_hub",
        "onnx",
        "onnx_ir",
        "onnxscript",
        "optimum",
        "psutil",
        "safetensors",
        "sentencepiece",
        "torch",
        "transformers",
    }
)
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an exception into one line on standard error and an exit code.

    `ONNXLM_DEBUG=1` adds the traceback.
    """
    try:
        yield
    except OnnxlmError as error:
        _fail(error, BAD_INPUT, str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXPORT_EXTRA:
            _fail_as_bug(error)
        need = f"this needs the library '{library}', which is not installed"
        _fail(error, BAD_INPUT, f"{need}; pip install 'onnxlm[export]'")
    except OSError as error:
        if error.strerror is None:
            _fail_as_bug(error)
        where = "" if error.filename is None else f"{error.filename}: "
        _fail(error, BAD_INPUT, f"{where}{error.strerror}")
    except MemoryError as error:
        _fail(error, BAD_INPUT, "there is not enough memory for this")
    except Exception as error:
        _fail_as_bug(error)


def _fail_as_bug(error: Exception) -> NoReturn:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    _fail(error, BUG, f"a bug in onnxlm: {said}; {DEBUG}=1 shows where, please report it")


def _fail(error: BaseException, code: int, text: str) -> NoReturn:
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    sys.stderr.write(f"error: {text}\n")
    sys.exit(code)


def quiet_libraries() -> None:
    """Keep what libraries say of themselves off the terminal; our own warnings are one line each."""
    if hasattr(
        sys.stdout, "reconfigure"
    ):  # text that the terminal's encoding lacks is no reason to stop
        sys.stdout.reconfigure(errors="replace")
    # So that unfinished files are cleaned up, as on Ctrl-C.
    signal.signal(signal.SIGTERM, _terminate)
    if os.environ.get(DEBUG):
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Without a handler Python prints records of warnings itself.
    logging.getLogger().addHandler(logging.NullHandler())
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", OnnxlmWarning)
    warnings.showwarning = _show_warning


def _terminate(signal_number: int, frame: object) -> NoReturn:
    sys.exit(TERMINATED)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    sys.stderr.write(f"warning: {message}\n")
