"""A strategy: one frozen document that says how a model is sharded, computed and compressed.

Everything that can be tuned is in it (`shardlab.strategy.settings`), and nothing that can be tuned
is elsewhere. Two documents of equal meaning have equal canonical forms and so equal hashes.
"""

from typing import Any, Self

from pydantic import model_validator

from shardlab.core.document import Document, validate
from shardlab.core.files import sha256_of_value
from shardlab.strategy.label import label
from shardlab.strategy.overrides import canonical_overrides
from shardlab.strategy.settings import Settings
from shardlab.strategy.validation import check


class Strategy(Settings):
    """How a model is trained on several ranks: settings that go together."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(self)
        return self

    def canonical(self) -> "Strategy":
        """The same meaning with every default written out."""
        route = "exchange" if self.engine == "manual" or self.grad_sync == "gpu_reduce" else None
        gradients = self.gradients
        if gradients.route is None:
            gradients = gradients.model_copy(update={"route": route})
        updates: dict[str, Any] = {"gradients": gradients.canonical()}
        if self.engine == "ddp":
            updates["bucket_mb"] = float(self.bucket_mb or 25)
        elif self.engine == "slide":
            updates |= self._canonical_sliding()
        else:
            updates |= {**self._canonical_sharding(), **self._canonical_prefetch()}
            updates["weights"] = self.weights.canonical() if self.weights else None
            # what torch does by itself
            updates["limit_all_gathers"] = False if self.limit_all_gathers is False else None
            updates["use_orig_params"] = self.use_orig_params or None
        own = {
            "reshard_after_forward": updates.get("reshard_after_forward"),
            "param_dtype": self.param_dtype,
            "activation_checkpointing": self.activation_checkpointing,
        }
        updates["overrides"] = canonical_overrides(self.overrides, own)
        return self.model_copy(update=updates)

    def _canonical_sliding(self) -> dict[str, Any]:
        # the device reduces every micro-batch, of which there may be but one
        always = self.grad_sync == "gpu_reduce" and self.accumulation != 1
        return {
            "wrap": self.wrap or "block",
            "wrap_size": self._canonical_wrap_size(),
            "window": self.window or 2,
            "param_transfer": self.param_transfer or "full",
            "grad_sync": self.grad_sync or "cpu_reduce",
            "reduce_every_micro_batch": always or self.reduce_every_micro_batch,
            "weights": self.weights.canonical() if self.weights else None,
        }

    def _canonical_wrap_size(self) -> int | None:
        one_block = self.wrap in (None, "block") and self.wrap_size == 1
        return None if one_block else self.wrap_size

    def _canonical_sharding(self) -> dict[str, Any]:
        sharding, wrap = self.sharding or "full_shard", self.wrap or "block"
        reshard = self.reshard_after_forward
        if sharding == "shard_grad_op":
            sharding, reshard = "full_shard", False
        if sharding == "no_shard":
            reshard = None
        elif reshard is None:
            reshard = wrap != "root"
        return {
            "sharding": sharding,
            "wrap": wrap,
            "wrap_size": self._canonical_wrap_size(),
            "reshard_after_forward": reshard,
            "placement": (self.placement or "dim0") if self.engine == "fsdp2" else None,
        }

    def _canonical_prefetch(self) -> dict[str, Any]:
        """None for what torch does by itself."""
        forward, backward = self.depths()
        if self.engine == "manual":
            return {
                "prefetch": forward,
                "prefetch_backward": None if backward == forward else backward,
            }
        default = 1 if self.engine == "fsdp1" else forward
        asynchronous = self.async_unshard
        if asynchronous is bool(forward or backward):
            asynchronous = None
        return {
            "prefetch": forward or None,
            "prefetch_backward": None if backward == default else backward,
            "async_unshard": asynchronous,
        }

    def hash(self) -> str:
        """16 hexadecimal digits; equal for equal meanings."""
        return sha256_of_value(_meaning(self.canonical()))[:16]

    def label(self) -> str:
        """The strategy in a few words, for tables and prompts; different for different meanings.

        A codec's first option is always named, all else only where it is not the default.
        """
        return label(self.canonical())


_SILENT = {"sharding": "full_shard", "placement": "dim0"}
"""what strategies meant before they could say it"""


def _meaning(value: Any) -> Any:
    """Plain data without defaults: an option that comes later leaves the hashes as they are."""
    if isinstance(value, tuple):
        return [_meaning(each) for each in value]
    if not isinstance(value, Document):
        return value
    return {
        key: _meaning(getattr(value, key))
        for key, field in type(value).model_fields.items()
        if key == "name" or getattr(value, key) not in (field.default, _SILENT.get(key))
    }


def parse_strategy(value: Any, where: str = "strategy") -> Strategy:
    """A strategy from plain data.

    Raises:
        UserError: the key, what was expected and the fix.
    """
    return validate(Strategy, value, where)
