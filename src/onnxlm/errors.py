"""One tree of errors whose text is one line: what failed, what was found, what is allowed, what to do."""

from __future__ import annotations


class OnnxlmError(Exception):
    """A fault of the input or the machine that the user can mend; the CLI prints it and exits 2.

    Args:
        what: What failed, naming the file or field.
        found: The value found, if one explains the fault.
        allowed: The values that would have been accepted.
        fix: The next step to take.
    """

    def __init__(
        self, what: str, *, found: object = None, allowed: object = None, fix: str | None = None
    ) -> None:
        parts = [what]
        if found is not None:
            parts.append(f"found {found}")
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if fix is not None:
            parts.append(fix)
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


class CheckpointError(OnnxlmError):
    """A checkpoint is missing, incomplete, damaged or does not fit its config."""


class ConfigError(OnnxlmError):
    """A configuration field is missing, has a wrong type, or asks for what is not supported."""


class PackageError(OnnxlmError):
    """A package on disk is incomplete, damaged, or of another format version."""


class ExportError(OnnxlmError):
    """A model cannot be cast into graphs, or the destination cannot be written."""


class QuantizationError(OnnxlmError):
    """A quantization request makes no sense or cannot be met."""


class ProviderError(OnnxlmError):
    """An execution provider is unknown, absent, or not the one the session really uses."""


class InputError(OnnxlmError):
    """A prompt, token id or generation field is out of its bounds."""


class OnnxlmWarning(UserWarning):
    """What a user should know though nothing failed; the CLI prints it as one line."""
