"""A strategy: one frozen document that says how a model is sharded, computed and compressed.

Everything that can be tuned is here, and nothing that can be tuned is elsewhere. Two documents of
equal meaning have equal normal forms and so equal hashes.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shardlab.core.brief import brief
from shardlab.core.compression import Compression, WeightCompression
from shardlab.core.document import Document, validate
from shardlab.core.files import sha256_of_value
from shardlab.core.legality import check
from shardlab.core.overrides import Checkpointing, DType, Overrides, Reshard, normal_overrides


class Strategy(Document):
    """How a model is trained on several ranks."""

    engine: Literal["ddp", "fsdp1", "fsdp2", "manual"] = "fsdp2"
    sharding: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] | None = None
    """full_shard: every rank keeps 1/W of parameters, gradients and optimizer states (default);
    shard_grad_op: gathered parameters stay until backward; no_shard: nothing is sharded;
    hybrid_shard: several copies of the model, each sharded over neighbouring ranks"""
    replicas: int | None = Field(None, ge=2)
    """hybrid_shard: number of copies"""
    wrap: Literal["block", "size", "root"] | None = None
    """what is gathered and reduced together. block: `wrap_size` transformer blocks; size: blocks
    with at least `wrap_size` elements; root: the whole model"""
    wrap_size: int | None = Field(None, ge=1)
    """blocks (default 1) or elements of a unit"""
    reshard_after_forward: Reshard | None = None
    """free gathered parameters after forward (default) or keep them for backward; a number: keep
    them sharded over groups of so many ranks"""
    placement: Literal["dim0", "dim1", "largest"] | None = None
    """fsdp2: the dimension that a parameter is sharded on (default dim0); dim1 and largest where
    it splits evenly"""
    overrides: Overrides = ()
    """what some layers do otherwise; later ones win"""
    prefetch: int | None = Field(None, ge=0)
    """units that are gathered ahead of their use (default: 1 for manual, else 0)"""
    prefetch_backward: int | None = Field(None, ge=0)
    """the same in backward (default: as `prefetch`; fsdp1: 1)"""
    async_unshard: bool | None = None
    """fsdp2: gathering does not stop the computation, on devices without streams neither does
    reduction (default: with prefetch)"""
    limit_all_gathers: bool | None = None
    """fsdp1: the host waits before it gathers too far ahead (default)"""
    use_orig_params: bool | None = None
    """fsdp1: the optimizer sees parts of parameters instead of one flat vector per unit"""
    bucket_mb: float | None = Field(None, gt=0)
    """ddp: size of a gradient bucket in MiB (default 25)"""
    param_dtype: DType = "auto"
    """what computes and is gathered; weights are updated in float32. auto: bf16 or fp16 where the
    device is made for it, else fp32. fp16 scales the loss; ddp computes by autocast"""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fsdp1, fsdp2, manual: what gradients are reduced in"""
    output_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """fsdp2: what the model returns (default: as computed)"""
    activation_checkpointing: Checkpointing = "none"
    """what backward computes again for each block: nothing, all but its matrix products, or all"""
    compile: bool = False
    """torch.compile for each block"""
    accumulation: int | None = Field(None, ge=1)
    """micro-batches that the samples of a rank are cut into (default: train.accumulation)"""
    reduce_every_micro_batch: bool = False
    """fsdp1, fsdp2, manual: sum up shards of gradients instead of whole ones: more communication,
    less memory"""
    offload: bool = False
    """fsdp1, fsdp2: shards and the optimizer stay in CPU memory"""
    gradients: Compression = Compression()
    weights: WeightCompression | None = None
    """fsdp1, fsdp2, manual: how gathered parameters travel (default: as they are)"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check(self)
        return self

    def normal(self) -> "Strategy":
        """The same meaning with every default written out."""
        route = "exchange" if self.engine == "manual" else None
        gradients = self.gradients
        if gradients.route is None:
            gradients = gradients.model_copy(update={"route": route})
        updates: dict[str, Any] = {"gradients": gradients.normal()}
        if self.engine == "ddp":
            updates["bucket_mb"] = float(self.bucket_mb or 25)
        else:
            updates |= {**self._normal_sharding(), **self._normal_prefetch()}
            updates["weights"] = self.weights.normal() if self.weights else None
            # what torch does by itself
            updates["limit_all_gathers"] = False if self.limit_all_gathers is False else None
            updates["use_orig_params"] = self.use_orig_params or None
        own = {
            "reshard_after_forward": updates.get("reshard_after_forward"),
            "param_dtype": self.param_dtype,
            "activation_checkpointing": self.activation_checkpointing,
        }
        updates["overrides"] = normal_overrides(self.overrides, own)
        return self.model_copy(update=updates)

    def _normal_sharding(self) -> dict[str, Any]:
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
            "wrap_size": None if wrap == "block" and self.wrap_size == 1 else self.wrap_size,
            "reshard_after_forward": reshard,
            "placement": (self.placement or "dim0") if self.engine == "fsdp2" else None,
        }

    def _normal_prefetch(self) -> dict[str, Any]:
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

    def depths(self) -> tuple[int, int]:
        """Units that are gathered ahead in forward and in backward."""
        forward, backward = self.prefetch, self.prefetch_backward
        if forward is None:
            ahead = self.engine == "manual" and self.wrap != "root" and self.sharding != "no_shard"
            forward = int(ahead)
        if backward is None:
            backward = 1 if self.engine == "fsdp1" else forward
        return forward, backward

    def hash(self) -> str:
        """16 hexadecimal digits; equal for equal meanings."""
        return sha256_of_value(_meaning(self.normal()))[:16]

    def brief(self) -> str:
        """The strategy in a few words, for tables and prompts; different for different meanings.

        A codec's first option is always named, all else only where it is not the default.
        """
        return brief(self.normal())


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
        UserError: the key, what was expected and the mend.
    """
    return validate(Strategy, value, where)
