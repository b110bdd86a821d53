"""Small codecs with the properties that collectives must support, and one route of each kind."""

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, Content, key_words
from shardlab.codecs.registry import make_method
from shardlab.comm.attach import Route

ROUTES = {
    "native": Route(make_method("none"), native=True),
    "all-to-all": Route(make_method("none")),
    "int8": Route(make_method("int8")),
    "stochastic": Route(make_method("qsgd"), seed=3),
    "variable size": Route(make_method("threshold:threshold=1.0")),
    "native linear": Route(make_method("randomk"), native=True),
    "multi-phase": Route(make_method("powersgd")),
    "hierarchical": Route(make_method("int8"), between_nodes=make_method("int4"), ranks_per_node=2),
    "bypass": Route(make_method("int8"), excluded=frozenset({"bias"}), warmup=1),
}


class RandomHalf(Codec):
    """Every other element, from a random first one that all ranks share: random and linear."""

    name = "random half"
    unbiased = False
    linear = True

    def payload_bytes(self, n: int) -> int:
        return 4 * (n // 2)

    def content(self, n: int, payload: Tensor) -> Content:
        return Content(n // 2, 0, 0)

    def encode(self, vector, key=None, out=None):
        payload = torch.cat([self._chosen(vector, key)]).view(torch.uint8)
        return payload if out is None else out.copy_(payload)

    def decode_add(self, payload, out, alpha=1.0, key=None):
        self._check_payload(payload, out.numel())
        self._chosen(out, key).add_(payload.view(torch.float32), alpha=alpha)

    def _chosen(self, vector, key):
        assert key is not None
        first = key_words(key.shared(), self.name)[0] % 2
        return vector[first::2][: vector.numel() // 2]


class Positive(Codec):
    """The positive elements, each with its index: the size depends on the values."""

    name = "positive"
    unbiased = False
    variable = True

    def payload_bytes(self, n: int) -> int:
        return 6 * n

    def content(self, n: int, payload: Tensor) -> Content:
        return Content(payload.numel() // 6, payload.numel() // 3, 0)

    def encode(self, vector, key=None, out=None):
        index = vector.gt(0).nonzero().flatten()
        places = index.to(torch.int16).view(torch.uint8)
        payload = torch.cat([vector[index].view(torch.uint8), places])
        if out is None:
            return payload
        out[: payload.numel()] = payload
        return out[: payload.numel()]

    def decode_add(self, payload, out, alpha=1.0, key=None):
        self._check_payload(payload, out.numel())
        values, places = payload.split([payload.numel() // 6 * 4, payload.numel() // 6 * 2])
        index = places.view(torch.int16).long()
        out.index_add_(0, index, values.view(torch.float32), alpha=alpha)
