"""One route of each kind."""

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
