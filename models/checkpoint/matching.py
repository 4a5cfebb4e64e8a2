"""Fits the tensors of a checkpoint to the parameters of a module: names and shapes, nothing read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.tensors import StoredTensor
from onnxlm.models.config import ModelConfig
from onnxlm.models.registry import Architecture

_LISTED = 8  # names printed of a longer list


def listed(names: Iterable[str]) -> str:
    """The first names and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


class NameMap:
    """Renames by a table whose "{i}" stands for a layer number.

    Args:
        table: Template -> template of the new name; None marks a name as known and not needed.
    """

    def __init__(self, table: Mapping[str, str | None]) -> None:
        self._rules = [
            (re.compile(re.escape(old).replace(r"\{i\}", r"(\d+)")), new)
            for old, new in table.items()
        ]

    def __contains__(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern, _ in self._rules)

    def rename(self, name: str) -> str | None:
        """The new name; None for one that is not needed.

        Raises:
            KeyError: The table does not know the name.
        """
        for pattern, new in self._rules:
            match = pattern.fullmatch(name)
            if match:
                return new if new is None else new.replace("{i}", "".join(match.groups()))
        raise KeyError(name)


def parameters_of(
    architecture: Architecture, config: ModelConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The module's parameters, without allocating them.

    Returns:
        Shape of each parameter by its first name, and the first name of each further name (tied weights).
    """
    with torch.device("meta"):
        module = architecture.build(config)
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original == name:
            shapes[name] = tuple(parameter.shape)
        else:
            aliases[name] = original
    return shapes, aliases


def match(
    stored: Mapping[str, StoredTensor],
    architecture: Architecture,
    config: ModelConfig,
    source: str,
) -> dict[str, StoredTensor]:
    """Assign every stored tensor to a parameter.

    Args:
        stored: Tensors by checkpoint name (the keys of the architecture's weight map).
        architecture: Gives the weight map and the module.
        config: Gives the shapes.
        source: File or folder, for messages.

    Returns:
        Stored tensor by parameter name, in the module's order. A tied weight appears once.

    Raises:
        CheckpointError: Tensors are missing, unexpected or mis-shaped, or a tied weight differs
            from its twin.
    """
    shapes, aliases = parameters_of(architecture, config)
    names = NameMap(architecture.weight_map)
    found: dict[str, StoredTensor] = {}
    unexpected = []
    for name, tensor in stored.items():
        parameter = names.rename(name) if name in names else name
        if parameter is None:
            continue
        if name not in names or parameter not in shapes.keys() | aliases.keys():
            unexpected.append(tensor.name)
        else:
            found[parameter] = tensor
    _refuse_unexpected(unexpected, source)
    twins = {name: tensor for name, tensor in found.items() if name in aliases}
    for alias, tensor in twins.items():
        found.setdefault(aliases[alias], tensor)
    _refuse_missing(shapes.keys() - found.keys(), architecture, source)
    _refuse_shapes(found, shapes | {alias: shapes[name] for alias, name in aliases.items()}, source)
    for alias, tensor in twins.items():
        _refuse_different(tensor, found[aliases[alias]], source)
    return {name: found[name] for name in shapes}


def _refuse_unexpected(names: list[str], source: str) -> None:
    if names:
        raise CheckpointError(
            f"{source}: tensors that the model has no place for",
            found=listed(names),
            fix="the config does not fit these weights, or the architecture is another one",
        )


def _refuse_missing(parameters: Iterable[str], architecture: Architecture, source: str) -> None:
    stored_names = NameMap({new: old for old, new in architecture.weight_map.items() if new})
    names = [str(stored_names.rename(parameter)) for parameter in parameters]
    if names:
        raise CheckpointError(
            f"{source}: tensors are missing: {listed(names)}",
            fix="fetch the checkpoint again, or correct its config",
        )


def _refuse_shapes(
    found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], source: str
) -> None:
    wrong = [
        f"{tensor.name} is {list(tensor.shape)} and should be {list(expected[name])}"
        for name, tensor in found.items()
        if tensor.shape != expected[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{source}: tensors have a shape that the config does not give: {listed(wrong)}",
            fix="correct the config, or fetch the weights that belong to it",
        )


def _refuse_different(alias: StoredTensor, original: StoredTensor, source: str) -> None:
    if alias is not original and not torch.equal(alias.read(), original.read()):
        raise CheckpointError(
            f"{source}: {alias.name} and {original.name} differ though tie_word_embeddings is true",
            fix="set tie_word_embeddings to false to use both",
        )
