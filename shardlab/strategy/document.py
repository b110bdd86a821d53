"""A strategy: one frozen document that says how a model is sharded, computed and compressed.

Everything that can be tuned is in it (`shardlab.strategy.settings`), and nothing that can be tuned
is elsewhere. Documents of equal meaning have equal canonical forms and so equal hashes.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from shardlab.core.document import Document, validate
from shardlab.core.files import sha256_of_value
from shardlab.core.ranges import format_ranges
from shardlab.strategy.compression import (
    CanonicalCompression,
    Compression,
    gradient_words,
    setting_words,
    weight_words,
)
from shardlab.strategy.settings import SETTINGS, Override, Settings, canonical_overrides
from shardlab.strategy.validation import check


def override_words(override: Override) -> str:
    """Return an override in words, such as `layers 0-2 reshard_after_forward=false`."""
    words = setting_words(override, Override.model_construct(), *SETTINGS)
    where = override.module or f"layers {format_ranges(override.layers or ())}"
    return f"{where} {' '.join(words) or 'a unit'}"


class Strategy(Settings):
    """Settings that are valid together, as a user writes them: any may be left out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(self)
        return self

    def canonical(self) -> "CanonicalStrategy":
        """Return the strategy of the same meaning with every default written out."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return CanonicalStrategy.model_construct(**values | _canonical_values(self))

    def hash(self) -> str:
        """Return 16 hexadecimal digits; equal for equal meanings."""
        return _hash(self.canonical())

    def after_warmup(self) -> Self:
        """Return the strategy of the steps after the warm-ups: without that of gradients, without
        that of `sync`, and without codecs of gradients that are then sent no more."""
        sync, gradients = self.sync, self.gradients.model_copy(update={"warmup_steps": 0})
        if sync is not None and sync.warmup_steps:
            sync = sync.model_copy(update={"warmup_steps": 0})
            if self.traits.residency == "replicated" or self.sharding == "no_shard":
                gradients = Compression()
            else:
                inside = {"between_nodes": None, "ranks_per_node": None}
                gradients = gradients.model_copy(update=inside)
        return type(self).model_validate({**dict(self), "sync": sync, "gradients": gradients})

    def label(self) -> str:
        """Return the strategy in a few words, for tables and prompts.

        Labels differ where meanings do. They always name the codec with its first option, all else
        as `key=value` where it is not the default of the engine.
        """
        full = self.canonical()
        apart = {"engine", "gradients", "weights", "overrides"}
        keys = [key for key in Settings.model_fields if key not in apart]
        words = [full.engine, *gradient_words(full.gradients)]
        if full.weights is not None:
            words.append(weight_words(full.weights))
        words += setting_words(full, Strategy(engine=full.engine).canonical(), *keys)
        return ", ".join([*words, *map(override_words, full.overrides)])


class CanonicalStrategy(Strategy):
    """Canonical form of a strategy: each setting of its engine has its value written out.

    None stands for a setting that the engine lacks, or for what torch does by default. Functions
    that depend on written-out defaults take this type, so that mypy refuses other strategies. Any
    document that is read as this type is validated as a `Strategy` and made canonical.
    """

    gradients: CanonicalCompression

    @model_validator(mode="wrap")
    @classmethod
    def _made_canonical(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Any:
        return value if isinstance(value, cls) else Strategy.model_validate(value).canonical()

    def canonical(self) -> "CanonicalStrategy":
        """Return the strategy itself."""
        return self

    def written(self) -> dict[str, Any]:
        """Return the strategy as plain data without the defaults of its engine, as in params.yaml.

        Its representation in Python is read alike by YAML.
        """
        default = Strategy(engine=self.engine).canonical()
        document: dict[str, Any] = {"engine": self.engine}
        for key, value in self.model_dump(mode="json", exclude_none=True).items():
            settings = getattr(self, key)
            if settings != getattr(default, key):
                document[key] = settings.written() if key in _WRITTEN else value
        if parse_strategy(document).hash() != self.hash():
            # the route that this codec takes elsewhere is not the one that this engine chooses
            document["gradients"] = {**self.gradients.written(), "route": self.gradients.route}
        return document

    def entry(self, name: str) -> str:
        """Return the entry of params.yaml by a name, whose mapping Python reads, too."""
        return f"strategies:\n  {name!r}: {self.written()!r}"

    def attach_call(self) -> str | None:
        """Return the call of `shardlab.attach` for the codecs and the synchronisation, and what
        follows training with it; None where there are none."""
        written = {key: value for key, value in self.written().items() if key in _WRITTEN}
        # the route of engines with messages of their own is no choice of a script
        routed = self.traits.native_route and self.traits.residency != "streamed"
        if self.gradients.plain() and not routed:
            written.pop("gradients", None)
        if not written:
            return None
        arguments = [f"{key}={value!r}" for key, value in written.items()]
        if self.sync is None:
            return f"handle = shardlab.attach(model, {', '.join(arguments)})"
        # without the end replicas that synchronise rarely stay unequal, and nothing would say so
        return (
            f"handle = shardlab.attach(model, {', '.join(arguments)}, optimizer=optimizer)\n"
            "handle.synchronize()  # after the last step"
        )

    def replica_count(self, world_size: int) -> int:
        """Return the number of replicas of the model among the ranks."""
        if self.traits.residency == "replicated" or self.sharding == "no_shard":
            return world_size
        return self.replicas or 1


_WRITTEN = ("gradients", "weights", "sync")
"""settings that `attach` takes"""


def parse_strategy(value: Any, where: str = "strategy") -> Strategy:
    """Return the strategy that plain data describes.

    Raises:
        UserError: the key, what was expected and the fix.
    """
    return validate(Strategy, value, where)


def differences(before: Strategy, after: Strategy) -> list[str]:
    """Return the settings in which two strategies differ in meaning."""
    one, other = before.canonical(), after.canonical()
    return [key for key in Strategy.model_fields if getattr(one, key) != getattr(other, key)]


def _canonical_values(strategy: Settings) -> dict[str, Any]:
    """Return the settings of the canonical form that may differ from the given ones."""
    traits = strategy.traits
    values: dict[str, Any] = {
        key: default if getattr(strategy, key) is None else getattr(strategy, key)
        for key, default in traits.defaults.items()
    }
    one_block = strategy.wrap in (None, "block") and strategy.wrap_size == 1
    values["wrap_size"] = None if one_block else strategy.wrap_size
    if "sharding" in traits.settings:
        values |= _canonical_sharding(values) | _canonical_prefetch(strategy)
    # None where torch does so by default
    values["limit_all_gathers"] = False if strategy.limit_all_gathers is False else None
    values["use_orig_params"] = strategy.use_orig_params or None
    values["moments"] = None if strategy.moments == "memory" else strategy.moments
    values["weights"] = strategy.weights.canonical() if strategy.weights else None
    values["sync"] = strategy.sync.canonical() if strategy.sync else None
    on_device = strategy.grad_sync == "gpu_reduce"
    native = traits.native_route and not on_device
    values["gradients"] = strategy.gradients.canonical(None if native else "exchange")
    base = {
        "reshard_after_forward": values.get("reshard_after_forward"),
        "param_dtype": strategy.param_dtype,
        "activation_checkpointing": strategy.activation_checkpointing,
    }
    values["overrides"] = canonical_overrides(strategy.overrides, base)
    return values


def _canonical_sharding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `sharding` and `reshard_after_forward`, given values with defaults filled in."""
    sharding, reshard = values["sharding"], values["reshard_after_forward"]
    if sharding == "shard_grad_op":
        return {"sharding": "full_shard", "reshard_after_forward": False}
    if sharding == "no_shard":
        return {"reshard_after_forward": None}
    # validation refuses true for the root, so there it is the default: backward follows at once
    return {"reshard_after_forward": False if values["wrap"] == "root" else reshard}


def _canonical_prefetch(strategy: Settings) -> dict[str, Any]:
    """Return the settings of prefetch, None for what torch does by default."""
    forward, backward = strategy.depths()
    default = strategy.traits.prefetch_backward
    asynchronous = strategy.async_unshard
    # with prefetch the default depends on the device
    if not asynchronous and not (forward or backward):
        asynchronous = None
    return {
        # engines that prefetch by default write down their depth, 0 included
        "prefetch": forward if strategy.traits.prefetch else forward or None,
        "prefetch_backward": (
            None if backward == (forward if default is None else default) else backward
        ),
        "async_unshard": asynchronous,
    }


_SILENT = {"sharding": "full_shard", "placement": "dim0"}
"""meaning of strategies from before these settings existed; hashes leave it out"""


# a search asks for that of each of its candidates again and again
@lru_cache(maxsize=1 << 15)
def _hash(strategy: CanonicalStrategy) -> str:
    return sha256_of_value(_meaning(strategy))[:16]


def _meaning(value: Any) -> Any:
    """Return plain data without defaults, so that a new setting leaves old hashes as they are."""
    if isinstance(value, tuple):
        return [_meaning(item) for item in value]
    if not isinstance(value, Document):
        return value
    return {
        key: _meaning(getattr(value, key))
        for key, field in type(value).model_fields.items()
        if key == "name" or getattr(value, key) not in (field.default, _SILENT.get(key))
    }
