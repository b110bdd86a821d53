"""Codecs of other packages, each as two calls on one vector; `rivals.py` times them.

Every maker imports its package itself, so that one that is absent or broken fails alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW = 128
"""elements that share a scale, where the package lets one choose"""
_DENSITY, _RANK = 0.01, 4


class Calls(NamedTuple):
    """Calls of a codec on one vector."""

    encode: Callable[[], Any]
    decode: Callable[[], Tensor | None]
    """the decoded vector; it may be called after `encode`"""
    wire_bytes: int


class Rival(NamedTuple):
    """Codec of another package for a task, and ours for the same."""

    task: str
    name: str
    ours: str
    make: Callable[[Tensor], Calls]


def _size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _fbgemm_int8(x: Tensor) -> Calls:
    import fbgemm_gpu  # noqa: F401

    rows, ops = x.view(-1, ROW), torch.ops.fbgemm
    packed, out = ops.FloatToFused8BitRowwiseQuantized(rows), torch.empty_like(rows)
    return Calls(
        lambda: ops.FloatToFused8BitRowwiseQuantizedOut(packed, rows),
        lambda: ops.Fused8BitRowwiseQuantizedToFloatOut(out, packed),
        _size(packed),
    )


def _fbgemm_int4(x: Tensor) -> Calls:
    import fbgemm_gpu  # noqa: F401

    rows, ops = x.view(-1, ROW), torch.ops.fbgemm
    packed = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)
    return Calls(
        lambda: ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4),
        lambda: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(packed, 4),
        _size(packed),
    )


def _qcomm(precision: str) -> Callable[[Tensor], Calls]:
    def make(x: Tensor) -> Calls:
        from fbgemm_gpu.quantize_comm import QuantizedCommCodec
        from fbgemm_gpu.split_embedding_configs import SparseType

        codec = QuantizedCommCodec(SparseType(precision), row_dim=ROW)
        context = codec.create_context()
        packed = codec.encode(x, context)
        return Calls(
            lambda: codec.encode(x, context), lambda: codec.decode(packed, context), _size(packed)
        )

    return make


def _bitsandbytes_8bit(x: Tensor) -> Calls:
    """Decode into new memory: the operator with `out` does not exist on the CPU."""
    from bitsandbytes import functional

    codes, state = functional.quantize_blockwise(x, blocksize=256)
    return Calls(
        lambda: functional.quantize_blockwise(
            x, code=state.code, absmax=state.absmax, out=codes, blocksize=256
        ),
        lambda: functional.dequantize_blockwise(codes, state, blocksize=256),
        _size(codes, state.absmax),
    )


def _bitsandbytes_nf4(x: Tensor) -> Calls:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(x, blocksize=ROW, quant_type="nf4")
    return Calls(
        lambda: functional.quantize_4bit(
            x, absmax=state.absmax, out=codes, blocksize=ROW, quant_type="nf4"
        ),
        lambda: functional.dequantize_4bit(codes, state),
        _size(codes, state.absmax),
    )


def _torchao_mxfp8(x: Tensor) -> Calls:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    short = torch.float8_e4m3fn
    scale, codes = to_mx(x, short, 32)
    return Calls(
        lambda: to_mx(x, short, 32),
        lambda: to_dtype(codes, scale, short, 32, torch.float32),
        _size(codes, scale),
    )


def _torchao_float8(x: Tensor) -> Calls:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    def encode() -> Any:
        return hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig())

    packed = encode()
    return Calls(encode, packed.to_original_precision, packed._data.nbytes + 4)


def _torchao_qmap(x: Tensor) -> Calls:
    from torchao.optim import quant_utils

    levels = torch.tensor(quant_utils.create_dynamic_map(), device=x.device)

    def encode() -> tuple[Tensor, Tensor]:
        scaled, scale = quant_utils.scale_tensor(x, 256)
        return quant_utils.quantize_8bit_with_qmap(scaled, levels), scale

    codes, scale = encode()
    return Calls(
        encode,
        lambda: quant_utils.dequant_with_qmap(codes, levels, scale),
        _size(codes, scale),
    )


def _torch_cast(dtype: torch.dtype) -> Callable[[Tensor], Calls]:
    def make(x: Tensor) -> Calls:
        short, out = x.to(dtype), torch.empty_like(x)
        return Calls(lambda: short.copy_(x), lambda: out.copy_(short), _size(short))

    return make


def _ddp_fp16_hook(x: Tensor) -> Calls:
    """Run `default_hooks._compress_hook` without the all-reduce, at one rank."""
    out = torch.empty_like(x)
    short = x.to(torch.float16).div_(1)
    return Calls(lambda: x.to(torch.float16).div_(1), lambda: out.copy_(short), _size(short))


def _torch_topk(x: Tensor) -> Calls:
    """Return values and int32 indices, as any top-k on `torch.topk` has to send them."""
    k = round(_DENSITY * x.numel())
    out = torch.empty_like(x)

    def encode() -> tuple[Tensor, Tensor]:
        index = torch.topk(x.abs(), k, sorted=False).indices
        return x[index], index.to(torch.int32)

    values, index = encode()
    return Calls(
        encode, lambda: out.zero_().index_add_(0, index.long(), values), _size(values, index)
    )


def _ddp_powersgd_hook(x: Tensor) -> Calls:
    """Run `powerSGD_hook` without the all-reduces, on one square matrix, residual included."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

    side = int(x.numel() ** 0.5)
    matrix = x[: side * side].view(1, side, side)
    q = torch.randn(1, side, _RANK, generator=torch.Generator().manual_seed(0)).to(x.device)
    p, out, rest = matrix @ q, torch.empty_like(matrix), torch.empty_like(matrix)

    def reduce() -> None:
        _orthogonalize(q)
        torch.bmm(matrix, q, out=p)
        _orthogonalize(p)
        torch.bmm(matrix.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=out)
        torch.sub(matrix, out, out=rest)

    reduce()
    return Calls(reduce, lambda: None, _size(p, q))


RIVALS = [
    Rival("8 bit", f"FBGEMM int8, rows of {ROW}", "int8:group=128", _fbgemm_int8),
    Rival("8 bit", "bitsandbytes blockwise 8 bit", "dynamic8:group=256", _bitsandbytes_8bit),
    Rival("8 bit", "torchao 8-bit map, eager", "dynamic8:group=256", _torchao_qmap),
    Rival("8 bit", "torchao MXFP8, eager", "fp8:format=e4m3,group=128", _torchao_mxfp8),
    Rival("8 bit", "torchao float8 per tensor", "fp8:format=e4m3,group=128", _torchao_float8),
    Rival("8 bit", f"FBGEMM qcomm fp8, rows of {ROW}", "fp8:format=e4m3,group=128", _qcomm("fp8")),
    Rival("4 bit", f"FBGEMM FusedNBit int4, rows of {ROW}", "int4:group=128", _fbgemm_int4),
    Rival("4 bit", "bitsandbytes nf4", "int4:group=128,levels=nf4", _bitsandbytes_nf4),
    Rival("16 bit", "torch cast to float16", "fp16", _torch_cast(torch.float16)),
    Rival("16 bit", "torch DDP fp16_compress_hook", "fp16", _ddp_fp16_hook),
    Rival("16 bit", "FBGEMM qcomm fp16", "fp16", _qcomm("fp16")),
    Rival("16 bit", "torch cast to bfloat16", "bf16", _torch_cast(torch.bfloat16)),
    Rival("16 bit", "FBGEMM qcomm bf16", "bf16", _qcomm("bf16")),
    Rival("top-k 1 %", "torch.topk", "topk:density=0.01", _torch_topk),
    Rival("low rank 4", "torch DDP powerSGD_hook", "powersgd:rank=4", _ddp_powersgd_hook),
]
