"""Parameters by the names that their users know, without those of wrappers around modules."""

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
"""what FSDP1, activation checkpointing, Lightning Fabric and torch.compile put into names"""


def plain(name: str) -> str:
    """The name that the module or parameter had before it was wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix(wrapper.removesuffix("."))
    return name.removesuffix(".")


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter (tied ones have several), by its `id`; the first comes first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = names.setdefault(id(parameter), [])
        if plain(name) not in known:
            known.append(plain(name))
    return names


def matching(patterns: Sequence[str], names: Iterable[Sequence[str]]) -> frozenset[str]:
    """The first names of the parameters of which any name matches any of the patterns.

    Args:
        patterns: of `fnmatch`, as in `*.bias`; letter case counts.

    Raises:
        UserError: a pattern matches nothing.
    """
    every = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for known in every for name in known):
            hint = nearest(pattern, [name for known in every for name in known])
            raise UserError(f"exclude: no parameter matches {pattern!r}; {_short(hint)}")
    return frozenset(
        known[0]
        for known in every
        if any(fnmatch.fnmatchcase(name, pattern) for name in known for pattern in patterns)
    )


def whole_units(units: Mapping[str, Sequence[str]], patterns: Sequence[str]) -> frozenset[str]:
    """The units, each one flat vector, of which every parameter matches a pattern.

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
                f"exclude: unit {unit!r} travels as one flat vector, which cannot be split by "
                f"parameter ({left[0]!r} does not match): match whole units, or use fully_shard"
            )
    return frozenset(whole)


def _short(hint: str) -> str:
    return hint if len(hint) < 300 else f"{hint[:300]} ..."
