"""Codes of few bits in bytes, plane by plane (layout: `shardlab.kernels.grouped`), in PyTorch."""

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [groups, bytes] from codes [groups, count]."""
    if bits == 16:
        return codes.to(torch.int16).view(torch.uint8)
    if bits == 9:
        return torch.cat([(codes & 0xFF).to(torch.uint8), pack(codes >> 8, 1)], 1)
    groups, count = codes.shape
    width, per_byte = -(-count * bits // 8), 8 // bits
    planes = torch.nn.functional.pad(codes.to(torch.uint8), (0, width * per_byte - count))
    packed = torch.zeros(groups, width, dtype=torch.uint8, device=codes.device)
    for place, plane in enumerate(planes.view(groups, per_byte, width).unbind(1)):
        packed |= plane << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Codes [groups, count] from uint8 [groups, bytes]; int16 for 9 and 16 bits, else uint8."""
    if bits == 16:
        # a copy, since slices of larger messages may start at odd addresses
        return packed.clone().view(torch.int16)
    if bits == 9:
        highest = unpack(packed[:, count:], 1, count).to(torch.int16)
        return packed[:, :count].to(torch.int16) | highest << 8
    planes = [(packed >> (bits * place)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.cat(planes, 1)[:, :count]
