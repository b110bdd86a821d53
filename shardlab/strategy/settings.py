"""Every setting of a strategy, with its meaning and the engines that have it."""

from typing import Literal

from pydantic import Field

from shardlab.core.document import Document
from shardlab.strategy.compression import Compression, WeightCompression
from shardlab.strategy.overrides import Checkpointing, DType, Overrides, Reshard


class Settings(Document):
    """What can be tuned, each setting for itself; `Strategy` knows which go together."""

    engine: Literal["ddp", "fsdp1", "fsdp2", "manual", "slide"] = "fsdp2"
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
    """fsdp1, fsdp2, manual, and slide with gpu_reduce: what gradients are reduced in"""
    output_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """fsdp2: what the model returns (default: as computed)"""
    activation_checkpointing: Checkpointing = "none"
    """what backward computes again for each block: nothing, all but its matrix products, or all"""
    activations: Literal["device", "memory", "disk"] = "device"
    """where the inputs of checkpointed blocks are until backward: where they are computed, in main
    memory, or in a file in .work/activations or the folder that the variable SHARDLAB_ACTIVATIONS
    of the environment names"""
    compile: bool = False
    """torch.compile for each block"""
    accumulation: int | None = Field(None, ge=1)
    """micro-batches that the samples of a rank are cut into (default: train.accumulation)"""
    reduce_every_micro_batch: bool = False
    """fsdp1, fsdp2, manual, slide: sum up shards of gradients instead of whole ones: more
    communication, less memory. What gpu_reduce does anyway"""
    offload: bool = False
    """fsdp1, fsdp2: shards and the optimizer stay in CPU memory"""
    window: int | None = Field(None, ge=2)
    """slide: units that the device has memory for at a time, beside the root (default 2)"""
    param_transfer: Literal["full", "shard"] | None = None
    """slide: every rank loads whole units (full, default), or its part, and the ranks gather the
    rest on the device"""
    grad_sync: Literal["gpu_reduce", "cpu_reduce"] | None = None
    """slide: gradients are reduced on the device, after every micro-batch, and each rank copies its
    part; or each rank copies all of its own, which are summed in host memory (default)"""
    moments: Literal["memory", "disk"] = "memory"
    """slide: where the moments of AdamW are between updates: in host memory, or in a file without a
    name where `activations: disk` has its own"""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """slide: what the moments are kept in. bf16 rounds second moments by chance, so that they move
    as they should in the mean"""
    gradients: Compression = Compression()
    weights: WeightCompression | None = None
    """fsdp1, fsdp2, manual, and slide with param_transfer: shard: how gathered parameters travel
    (default: as they are)"""

    def depths(self) -> tuple[int, int]:
        """Units that are gathered ahead in forward and in backward."""
        forward, backward = self.prefetch, self.prefetch_backward
        if forward is None:
            ahead = self.engine == "manual" and self.wrap != "root" and self.sharding != "no_shard"
            forward = int(ahead)
        if backward is None:
            backward = 1 if self.engine == "fsdp1" else forward
        return forward, backward
