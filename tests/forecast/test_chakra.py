import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from shardlab.forecast.chakra import (
    COLLECTIVES,
    COMM_COLL_NODE,
    COMP_NODE,
    VERSION,
    execution_trace,
)
from shardlab.forecast.costs import OnCluster
from shardlab.forecast.extrapolation import by_itself
from shardlab.forecast.presets import PRESETS
from shardlab.forecast.step import step_tasks
from shardlab.forecast.workload import case_of
from tests.forecast.timing_factory import MODEL, STRATEGIES, made_run

Field = descriptor_pb2.FieldDescriptorProto
ONE, MANY = Field.LABEL_OPTIONAL, Field.LABEL_REPEATED
MESSAGES = {  # of et_def.proto, what is used here
    "AttributeProto": [
        ("name", 1, Field.TYPE_STRING, ONE),
        ("int64_val", 9, Field.TYPE_INT64, ONE),
        ("uint64_val", 13, Field.TYPE_UINT64, ONE),
        ("bool_val", 27, Field.TYPE_BOOL, ONE),
    ],
    "GlobalMetadata": [("version", 1, Field.TYPE_STRING, ONE)],
    "Node": [
        ("id", 1, Field.TYPE_UINT64, ONE),
        ("name", 2, Field.TYPE_STRING, ONE),
        ("type", 3, Field.TYPE_INT32, ONE),
        ("ctrl_deps", 4, Field.TYPE_UINT64, MANY),
        ("data_deps", 5, Field.TYPE_UINT64, MANY),
        ("duration_micros", 7, Field.TYPE_UINT64, ONE),
        ("attr", 10, Field.TYPE_MESSAGE, MANY),
    ],
}


@pytest.fixture(scope="module")
def schema():
    """The messages as Google's own library reads them."""
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label in fields:
            made = message.field.add(name=field, number=number, type=kind, label=label)
            if kind == Field.TYPE_MESSAGE:
                made.type_name = ".ChakraProtoMsg.AttributeProto"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in MESSAGES
    }


def read(content, schema):
    """Metadata and nodes: messages after their lengths."""
    messages, place = [], 0
    while place < len(content):
        size = shift = 0
        while True:
            byte = content[place]
            place += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        messages.append(content[place : place + size])
        place += size
    assert place == len(content)
    first, *rest = messages
    return schema["GlobalMetadata"].FromString(first), [schema["Node"].FromString(m) for m in rest]


def attributes(node):
    return {each.name: each for each in node.attr}


@pytest.mark.parametrize("name", STRATEGIES)
def test_chakra_trace_decodes_to_the_step(name, schema):
    costs = OnCluster(PRESETS["dgx-h100"], 8)
    tasks = step_tasks(by_itself(case_of(made_run("x", name)), MODEL), costs)
    metadata, nodes = read(execution_trace(tasks), schema)
    assert metadata.version == VERSION
    assert [node.id for node in nodes] == list(range(len(nodes)))
    for node in nodes:
        assert all(before < node.id for before in [*node.ctrl_deps, *node.data_deps])
        assert not attributes(node)["is_cpu_op"].bool_val
    phases = [phase for task in tasks for phase in task.phases if phase.operation]
    found = [node for node in nodes if node.type == COMM_COLL_NODE]
    assert [attributes(node)["comm_type"].int64_val for node in found] == [
        COLLECTIVES[phase.operation] for phase in phases
    ]
    assert [attributes(node)["comm_size"].uint64_val for node in found] == [
        round(phase.vector_bytes) for phase in phases
    ]
    computed = sum(node.duration_micros for node in nodes if node.type == COMP_NODE)
    given = sum(p.cpu + p.wait for task in tasks for p in task.phases if not p.operation)
    assert computed == pytest.approx(1e6 * given, abs=len(nodes))


def test_computation_waits_for_what_it_gathers(schema):
    costs = OnCluster(PRESETS["dgx-h100"], 8)
    _, nodes = read(
        execution_trace(step_tasks(by_itself(case_of(made_run("x", "manual")), MODEL), costs)),
        schema,
    )
    gathers = {node.id for node in nodes if "gather" in node.name and node.type == COMM_COLL_NODE}
    awaited = {before for node in nodes if node.type == COMP_NODE for before in node.data_deps}
    assert gathers and gathers <= awaited
