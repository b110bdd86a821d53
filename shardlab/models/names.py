"""Names of parameters, whatever wraps the model, and the parameters that patterns match."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from shardlab.core.errors import UserError, nearest

_WRAPPERS = (
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
    "_original_module.",
    "_orig_mod.",
)
"""names added by FSDP1, activation checkpointing, Lightning Fabric and torch.compile"""


def plain(name: str) -> str:
    """Return the name of a module or parameter before it was wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper.removesuffix("."))
    return name.removesuffix(".")


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter by its `id`; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases = names.setdefault(id(parameter), [])
        if plain(name) not in aliases:
            aliases.append(plain(name))
    return names


def matching(patterns: Sequence[str], names: Iterable[Sequence[str]]) -> frozenset[str]:
    """Return the first names of the parameters of which any name matches any of the patterns.

    Args:
        patterns: of `fnmatch`, as in `*.bias`; case-sensitive.

    Raises:
        UserError: a pattern matches nothing.
    """
    matched: set[str] = set()
    every = list(names)
    for pattern in patterns:
        first_names = {aliases[0] for aliases in every if fnmatch.filter(aliases, pattern)}
        if not first_names:
            hint = nearest(pattern, [name for aliases in every for name in aliases])
            hint = hint if len(hint) < 300 else f"{hint[:300]} ..."
            raise UserError(f"exclude: no parameter matches {pattern!r}; {hint}")
        matched |= first_names
    return frozenset(matched)


def whole_units(units: Mapping[str, Sequence[str]], patterns: Sequence[str]) -> frozenset[str]:
    """Return the units, each one flat vector, of which every parameter matches a pattern.

    Args:
        units: the names of the parameters of each unit.

    Raises:
        UserError: a pattern matches nothing, or parts of a unit.
    """
    excluded = matching(patterns, [[name] for unit in units.values() for name in unit])
    whole = set()
    for unit, inside in units.items():
        left = [name for name in inside if name not in excluded]
        if inside and not left:
            whole.add(unit)
        elif len(left) < len(inside):
            raise UserError(
                f"exclude: unit {unit!r} is sent as one flat vector, which cannot be split by "
                f"parameter ({left[0]!r} does not match): match whole units, or use fully_shard"
            )
    return frozenset(whole)
