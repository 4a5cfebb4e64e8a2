"""How tensors of a checkpoint become parameters of a module, where a name for a name is not enough.

A table of rules maps name templates of stored tensors to what becomes of them; "{i}" stands for a layer
number, "{e}" for an expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """One stored tensor that holds several parameters, or one parameter in another form.

    Attributes:
        names: Templates of the parameters.
        pieces: (stored tensor, config) -> the parameters' values, in the order of the names. It must work on
            the meta device too: shapes are known before anything is read.
        rows: Each piece is some of the rows, unchanged, so that codes in blocks of a row can be cut as well.
    """

    names: tuple[str, ...]
    pieces: Callable[[Tensor, Any], Sequence[Tensor]]
    rows: bool = False


@dataclass(frozen=True)
class Stack:
    """One of many stored matrices that one parameter [E, slots * rows, columns] is put together from.

    The matrix of expert e becomes every `slots`-th row of the parameter's e-th matrix, from row `slot` on.

    Attributes:
        name: Template of the parameter.
        slot: Which of the matrices that share a parameter this is.
        slots: How many share it.
    """

    name: str
    slot: int = 0
    slots: int = 1


@dataclass(frozen=True)
class Either:
    """A tensor whose parameter has its name from the kind of layer that the config asks for.

    Attributes:
        names: Templates; the first that the module has is filled.
    """

    names: tuple[str, ...]


# None marks a tensor as known and not needed.
Rule = str | Cut | Stack | Either | None
Rules = Mapping[str, Rule]


def targets(rule: Rule) -> tuple[str, ...]:
    """Templates of the parameters that a rule fills."""
    if rule is None:
        return ()
    if isinstance(rule, (Cut, Either)):
        return rule.names
    return (rule.name,) if isinstance(rule, Stack) else (rule,)


def outer_module(rules: Rules) -> str:
    """What stands in front of every stored name but the head's: "model.", "transformer."; "" for nothing.

    A checkpoint that was saved from the inner module alone lacks it.
    """
    table = next((old for old, rule in rules.items() if "embed_tokens.weight" in targets(rule)), "")
    module, _, inside = table.partition(".")
    return f"{module}." if "." in inside else ""


def under(
    prefix: str, names: Mapping[str, str], parts: Sequence[str] = ("weight", "bias")
) -> Rules:
    """Rules for a layer's modules: `<prefix>.<old>.<part>` -> `layers.{i}.<new>.<part>`.

    Args:
        prefix: What stands in front of a module's name, with "{i}".
        names: Stored module name -> the name in this project's layer.
        parts: Tensors of a module.
    """
    return {
        f"{prefix}.{old}.{part}": f"layers.{{i}}.{new}.{part}"
        for old, new in names.items()
        for part in parts
    }


def transposed(name: str) -> Cut:
    """A matrix stored as [inputs, outputs]."""
    return Cut((name,), lambda stored, config: (stored.T,))


def raised(name: str) -> Cut:
    """A norm's weight stored as its difference to 1 (Gemma); the sum of a short float would lose its end."""
    return Cut((name,), lambda stored, config: (stored.float() + 1,))
