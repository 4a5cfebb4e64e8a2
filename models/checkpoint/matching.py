"""Fits the tensors of a checkpoint to the parameters of a module: names and shapes, nothing read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from onnxlm.errors import CheckpointError
from onnxlm.models.checkpoint.assembling import cut, stacked
from onnxlm.models.checkpoint.tensors import FLOATS, StoredTensor
from onnxlm.models.config import ModelConfig
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.registry import Architecture
from onnxlm.models.weight_rules import Cut, Either, Rule, Rules, Stack, outer_module, targets

_NOWHERE = ""  # the name of no parameter
_LISTED = 8  # names printed of a longer list


def listed(names: Iterable[str]) -> str:
    """The first names and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


@dataclass(frozen=True)
class Place:
    """Which layer and which expert a stored tensor belongs to; "" for none."""

    layer: str = ""
    expert: str = ""

    def fill(self, template: str) -> str:
        """The template with its numbers."""
        return template.replace("{i}", self.layer).replace("{e}", self.expert)


T = TypeVar("T")


class NameMap(Generic[T]):
    """A table whose keys are templates: "{i}" stands for a layer number, "{e}" for an expert's."""

    def __init__(self, table: Mapping[str, T]) -> None:
        self._rows = [(_pattern(template), value) for template, value in table.items()]

    def find(self, name: str) -> tuple[T, Place] | None:
        """The value of the template that `name` fits, and its numbers; None where there is none."""
        for pattern, value in self._rows:
            match = pattern.fullmatch(name)
            if match:
                numbers = match.groupdict()
                return value, Place(numbers.get("i") or "", numbers.get("e") or "")
        return None


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for letter in "ie":
        escaped = escaped.replace(rf"\{{{letter}\}}", rf"(?P<{letter}>\d+)")
    return re.compile(escaped)


def outline(architecture: Architecture, config: ModelConfig) -> DecoderLM:
    """The module without its weights: on the meta device it takes no memory."""
    with torch.device("meta"):
        return architecture.build(config)


def parameters_of(
    architecture: Architecture, config: ModelConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The module's parameters, without allocating them.

    Returns:
        Shape of each parameter by its first name, and the first name of each further name (tied weights).
    """
    module = outline(architecture, config)
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
    rules: Rules,
    architecture: Architecture,
    config: ModelConfig,
    source: str,
) -> dict[str, StoredTensor]:
    """Assign every stored tensor to a parameter.

    Args:
        stored: Tensors by their names in the checkpoint.
        rules: What becomes of them.
        architecture: Gives the module.
        config: Gives the shapes.
        source: File or folder, for messages.

    Returns:
        Stored tensor by parameter name, in the module's order. A tied weight appears once.

    Raises:
        CheckpointError: Tensors are missing, unexpected or mis-shaped, or a tied weight differs
            from its twin.
    """
    shapes, aliases = parameters_of(architecture, config)
    found, unexpected = _placed(stored, rules, config, shapes.keys() | aliases.keys(), source)
    _refuse_unexpected(unexpected, source)
    twins = {name: tensor for name, tensor in found.items() if name in aliases}
    for alias, tensor in twins.items():
        found.setdefault(aliases[alias], tensor)
    _refuse_missing(shapes.keys() - found.keys(), rules, source)
    _refuse_shapes(found, shapes | {alias: shapes[name] for alias, name in aliases.items()}, source)
    for alias, tensor in twins.items():
        _refuse_different(tensor, found[aliases[alias]], source)
    return {name: found[name] for name in shapes}


def _placed(
    stored: Mapping[str, StoredTensor],
    rules: Rules,
    config: ModelConfig,
    parameters: Set[str],
    source: str,
) -> tuple[dict[str, StoredTensor], list[str]]:
    """What each parameter is read from, and stored names that belong to none."""
    find = _finder(rules)
    found: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[tuple[int, int], StoredTensor]] = {}
    slots: dict[str, int] = {}
    unexpected, unreadable = [], []
    own = config.num_hidden_layers
    further = range(own, own + config.further_layers)
    for name, tensor in stored.items():
        rule, place = find(name)
        if rule is None or (place.layer and int(place.layer) in further):
            continue
        if tensor.unreadable:
            unreadable.append(f"{tensor.name} is {tensor.unreadable}")
        if isinstance(rule, Either):
            there = (one for one in rule.names if place.fill(one) in parameters)
            rule = next(there, rule.names[0])
        filled = [place.fill(target) for target in targets(rule)]
        # A place that is taken is none: of two spellings of one name nothing says which is meant.
        if any(target not in parameters or target in found for target in filled):
            unexpected.append(tensor.name)
        elif isinstance(rule, Stack):
            slots[filled[0]] = rule.slots
            stacks.setdefault(filled[0], {})[int(place.expert), rule.slot] = tensor
        elif isinstance(rule, Cut):
            found |= zip(filled, cut(tensor, rule, config), strict=True)
        else:
            found[filled[0]] = tensor
    _refuse_unreadable(unreadable, source)
    for name, pieces in stacks.items():
        found[name] = stacked(name, pieces, slots[name], source)
    return found, unexpected


def _finder(rules: Rules) -> Callable[[str], tuple[Rule, Place]]:
    """What becomes of a stored name, with the family's outer module in front of it or without.

    A family's own names are never those of a checkpoint: what its rules do to a tensor (Gemma's "+ 1") must
    not depend on how it was saved. Without rules names are the module's own.
    """
    names, outer = NameMap(rules), outer_module(rules)

    def find(name: str) -> tuple[Rule, Place]:
        if not rules:
            return name, Place()
        return names.find(name) or names.find(outer + name) or (_NOWHERE, Place())

    return find


def _refuse_unreadable(tensors: list[str], source: str) -> None:
    if tensors:
        raise CheckpointError(
            f"{source}: tensors of a type that cannot be read",
            found=listed(tensors),
            allowed=f"{', '.join(FLOATS)}; U8 as MXFP4, in a <name>_blocks and a <name>_scales",
        )


def _refuse_unexpected(names: list[str], source: str) -> None:
    if names:
        raise CheckpointError(
            f"{source}: tensors that the model has no place for",
            found=listed(names),
            fix="the config does not fit these weights, or the architecture is another one",
        )


def _refuse_missing(parameters: Iterable[str], rules: Rules, source: str) -> None:
    spellings: dict[str, list[str]] = {}
    for old, rule in rules.items():
        for new in targets(rule):
            spellings.setdefault(new, []).append(old)
    origins = NameMap(spellings)
    names = []
    for parameter in parameters:
        origin, place = origins.find(parameter) or ([parameter], Place())
        names.append(" or ".join(Place(place.layer, "*").fill(name) for name in origin))
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
