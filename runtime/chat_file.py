"""A conversation as a file: one JSON object with what was said and the tokens that were cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from onnxlm.errors import InputError
from onnxlm.strict_json import load_object
from onnxlm.whole_file import write_whole

FORMAT = 1


@dataclass(frozen=True)
class SavedChat:
    """What a file holds beside its format.

    Attributes:
        system: The system message that stays when the conversation begins anew.
        messages: Every message, the system message included.
        settings: Fields of `ChatSettings`.
        token_ids: The tokens in the cache, in order.
    """

    system: str | None
    messages: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    token_ids: Sequence[int]


def write_chat(path: str | Path, chat: SavedChat) -> None:
    """Write a file, whole or not at all.

    Raises:
        InputError: It cannot be written, or a setting holds what JSON cannot.
    """
    path = Path(path)
    try:
        raw = {"format": FORMAT, **asdict(chat)}
        text = json.dumps(raw, indent=1, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise InputError("the chat cannot be saved as JSON", found=error) from error
    try:
        write_whole(path, text + "\n")
    except (OSError, ValueError) as error:  # a path with a NUL is no path
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be written", found=reason) from error


def read_chat(path: str | Path) -> SavedChat:
    """Read a file.

    Raises:
        PackageError: It cannot be read or holds no JSON object.
        InputError: It is no saved chat.
    """
    raw = load_object(Path(path))
    if raw.pop("format", None) != FORMAT:
        raise _refused(path, "field 'format'", str(FORMAT))
    for name, (is_right, allowed) in _FIELDS.items():
        if not is_right(raw.get(name, _MISSING)):
            raise _refused(path, f"field '{name}'", allowed)
    unknown = sorted(raw.keys() - {field.name for field in fields(SavedChat)})
    if unknown:
        raise _refused(path, f"field '{unknown[0]}'", "none of that name")
    return SavedChat(**raw)


_MISSING = object()


def _refused(path: str | Path, what: str, allowed: str) -> InputError:
    return InputError(
        f"{path}: is no chat that can be loaded: {what}",
        allowed=allowed,
        fix="give a file that `save` wrote",
    )


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _are_settings(value: object) -> bool:
    """Of the types that `ChatSettings` has; what else is there it refuses by name."""
    if not isinstance(value, dict) or not isinstance(value.get("variables", {}), dict):
        return False
    lists = [value[key] for key in ("tools", "documents") if value.get(key) is not None]
    named = value.get("name") is None or isinstance(value["name"], str)
    return named and all(
        isinstance(listed, list) and all(isinstance(item, dict) for item in listed)
        for listed in lists
    )


_FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "system": (lambda value: value is None or isinstance(value, str), "text or null"),
    "messages": (_are_messages, "a list of objects with 'role'"),
    "settings": (
        _are_settings,
        "an object of tools and documents (lists of objects), name (text) and variables (an object)",
    ),
    "token_ids": (_are_ids, "a list of whole numbers"),
}
