"""On a GPU, work runs after its launch: what belongs to what follows the launch, not the clock."""

import pytest

from shardlab.profiling.breakdown import OTHER, analyse, read_steps
from shardlab.profiling.job import break_down
from shardlab.profiling.merge import merge_traces
from tests.profiling.nccl_trace_factory import AUTOGRAD, HOST, NCCL_STREAM, MadeTrace


def fsdp_step(launches=True, rank=0, late=0):
    """One step, launched within 300 us and done after 1000 us."""
    trace = MadeTrace(rank, launches)
    trace.label("ProfilerStep#1", 0, 1000)
    trace.label("shardlab::forward", 0, 100).label("shardlab::backward", 100, 200)
    trace.operator("aten::mm", 40, 60).operator("c10d::_allgather_base_", 15, 25)
    trace.copy(10, 70, launched=5)
    trace.label("FSDP::pre_forward (h.0)", 10, 35).label("FSDP::all_gather (h.0)", 12, 30)
    trace.nccl(60 + late, 200 + late, launched=20, collective="AllGather_RING_LL")
    trace.kernel(150 + late, 350 + late, launched=50)
    trace.kernel(350 + late, 700, launched=150, thread=AUTOGRAD)
    trace.label("FSDP::post_backward_reduce (h.0)", 155, 190, AUTOGRAD)
    trace.nccl(600, 900, 160, collective="ReduceScatter_Sum_f32_RING_LL", thread=AUTOGRAD)
    trace.kernel(700, 800, launched=250, name="multi_tensor_apply_kernel")
    return trace


def only_step(tmp_path, trace):
    (times,) = read_steps(trace.write(tmp_path / "0.json"))
    return times


def test_kernels_collectives_copies_and_idle_time_sum_to_the_step(tmp_path):
    times = only_step(tmp_path, fsdp_step())
    assert times.step_ms == pytest.approx(1.0)
    assert times.compute_ms == pytest.approx(0.65)
    assert times.comm_ms == pytest.approx(0.44)
    assert times.exposed_comm_ms == pytest.approx(0.09 + 0.1)
    assert (times.copy_ms, times.exposed_copy_ms) == pytest.approx((0.06, 0.05))
    assert times.idle_ms == pytest.approx(0.01 + 0.1)
    assert times.comm_ms_by_op == pytest.approx(
        {"nccl:all_gather": 0.14, "nccl:reduce_scatter": 0.3}
    )
    assert times.comm_ms_by_unit == pytest.approx({"h.0": 0.44})


def test_work_belongs_to_the_pass_that_launched_it(tmp_path):
    times = only_step(tmp_path, fsdp_step())
    assert (times.forward_compute_ms, times.forward_comm_ms) == pytest.approx((0.2, 0.14))
    assert (times.backward_compute_ms, times.backward_comm_ms) == pytest.approx((0.35, 0.3))
    assert (times.update_compute_ms, times.update_comm_ms) == pytest.approx((0.1, 0.0))
    passes = times.forward_ms, times.backward_ms, times.update_ms
    assert passes == pytest.approx((0.34, 0.55, 0.11))


def test_work_without_launch_belongs_to_the_pass_in_which_it_began(tmp_path):
    times = only_step(tmp_path, fsdp_step(launches=False))
    assert times.forward_comm_ms == pytest.approx(0.14)
    assert times.forward_compute_ms == 0
    assert times.backward_compute_ms == pytest.approx(0.2)
    assert times.update_compute_ms == pytest.approx(0.45)
    assert times.comm_ms_by_unit == pytest.approx({OTHER: 0.44})


def test_labels_name_the_unit_and_metadata_a_generic_kernel(tmp_path):
    trace = fsdp_step().label("shardlab::comm h.1", 218, 225)
    times = only_step(tmp_path, trace.nccl(920, 930, 220, "Generic_4", reported="allreduce"))
    assert times.comm_ms_by_unit == pytest.approx({"h.0": 0.44, "h.1": 0.01})
    assert times.comm_ms_by_op["nccl:all_reduce"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "reported", "operation"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "all_to_allv", "all_to_all"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "coalesced", "send_recv"),
        (
            "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
            "_allgather_base",
            "all_gather",
        ),
        ("void mscclpp::allreduce7<__half>(int)", None, "all_reduce"),
        ("oneccl_allreduce_large_kernel", None, "all_reduce"),
        ("hcom_allReduce__428_0_1", None, "all_reduce"),
        ("ncclSymkDevKernel_ReduceScatter_LD(ncclSymkDevWorkArgs4K)", None, "reduce_scatter"),
        ("void multimem_one_shot_all_reduce_kernel<float>(float*)", None, "symm_mem:all_reduce"),
        (
            "void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>()",
            None,
            "symm_mem:all_reduce",
        ),
        ("void deep_ep::internode_ll::dispatch<true, 3>()", None, "deep_ep:dispatch"),
        ("void deep_ep::intranode::combine<__nv_bfloat16>()", None, "deep_ep:combine"),
        ("void vllm::cross_device_reduce_1stage<float, 2>", None, "custom:all_reduce"),
        ("void flashinfer::comm::allreduce_fusion_kernel<float>()", None, "flashinfer:all_reduce"),
    ],
)
def test_a_collective_is_named_by_its_record_before_its_kernel(tmp_path, name, reported, operation):
    args = {} if reported is None else {"Collective name": reported}
    trace = MadeTrace().label("ProfilerStep#1", 0, 1000).operator("aten::mm", 0, 9)
    trace.launch("kernel", name, 100, 300, NCCL_STREAM, 50, HOST, **args)
    (step,) = break_down([trace.write(tmp_path / "0.json")]).steps
    expected = operation if ":" in operation else f"nccl:{operation}"
    assert step.comm_ms_by_op == pytest.approx({expected: 0.2})
    assert step.comm_ms == pytest.approx(0.2)
    if reported is None:
        # the range around the launch counts, too, as torch writes it where records say nothing
        path = trace.label("nccl:all_to_all", 49, 52).write(tmp_path / "0.json")
        (step,) = break_down([path]).steps
        assert [*step.comm_ms_by_op] == [f"{expected.partition(':')[0]}:all_to_all"]


def test_skew_and_transfer_are_separated_across_ranks(tmp_path):
    paths = [fsdp_step(rank=rank, late=40 * rank).write(tmp_path / f"{rank}") for rank in (0, 1)]
    merge_traces(paths, tmp_path / "trace.json.gz")
    early, late = read_steps(tmp_path / "trace.json.gz")
    assert (early.comm_skew_ms, early.comm_transfer_ms) == pytest.approx((0.04, 0.4))
    assert (late.comm_skew_ms, late.comm_transfer_ms) == pytest.approx((0.0, 0.44))
    assert analyse(tmp_path / "trace.json.gz").copy_ms == pytest.approx(0.06)
