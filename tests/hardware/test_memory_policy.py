"""Memory comes from the node that a thread prefers, where the kernel lets it say so."""

from concurrent.futures import ThreadPoolExecutor

from shardlab.hardware.topology import read_topology
from shardlab.launch.placement import policy_nodes, prefer_node


def test_a_thread_and_those_it_makes_prefer_a_node_and_no_others_do() -> None:
    node = max(read_topology().memory_nodes, default=0)

    def prefer() -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        taken = prefer_node(node)
        with ThreadPoolExecutor(1) as inner:
            return taken, policy_nodes(), inner.submit(policy_nodes).result()

    before = policy_nodes()
    with ThreadPoolExecutor(1) as outer:
        taken, own, inherited = outer.submit(prefer).result()
    assert own == inherited == ((node,) if taken else before)
    assert policy_nodes() == before


def test_a_node_that_is_not_there_changes_nothing() -> None:
    before = policy_nodes()
    assert not prefer_node(4000)
    assert policy_nodes() == before
