"""Measurements in words: one template, no ranking, in the order of hashes."""

import re

from shardlab.choose.decision import conclude
from shardlab.choose.evidence import describe, describe_data, describe_machine, describe_prediction
from shardlab.results.hardware import Connection, Gpu, Hardware
from shardlab.strategy.document import parse_strategy
from tests.choose.searches import (
    AGENT,
    DDP,
    KEPT,
    LIMIT,
    begin,
    proposal_of,
    trial_of,
)
from tests.record_factory import make_candidate


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("Strategy ")]


def test_strategies_have_one_template_in_the_order_of_their_hashes_without_praise():
    history = begin(["fsdp2", "fsdp2-int8", "fsdp2-int4", "ddp", "ddp-int8"])
    text = describe(history, AGENT, LIMIT)
    lines = lines_of(text)
    assert len({re.sub(r"\d+(\.\d+)?", "N", line.partition("]: ")[2]) for line in lines}) == 1
    by_hash = [history.measured[key].strategy.label() for key in sorted(history.measured)]
    assert [line.split(" [")[0].removeprefix("Strategy ") for line in lines] == by_hash
    praise = r"\b(best|better|worse|good|faster|slow\w*|should|recommend\w*)\b"
    assert not re.search(praise, text.lower())


def test_figures_are_means_over_seeds_and_bytes_by_kind_of_message():
    history = begin(["fsdp2"])
    seeds = [record.val_ppl for record in history.incumbent_results.trained]
    (line,) = lines_of(describe(history, AGENT, LIMIT))
    assert "trained with 2 of 2 seeds" in line
    assert f"validation perplexity {sum(seeds) / 2:.2f} +- " in line
    assert "gradients 2.600 MB asked, 2.600 MB moved; weights 5.200 MB asked, 5.200 MB" in line


def test_the_evidence_does_not_grow_by_the_round():
    history = begin()
    incumbent, start = (
        history.incumbent_results.strategy.label(),
        history.start_results.strategy.label(),
    )
    for number in range(1, 9):
        changed = parse_strategy({"engine": "ddp", "bucket_mb": 1.0 + number})
        proposal = proposal_of(history, changed)
        history = conclude(history, proposal, trial_of(proposal), AGENT)
        text = describe(history, AGENT, LIMIT)
        assert len(lines_of(text)) <= 6 and text.count("Round ") <= 4
        assert all(f"Strategy {label} [" in text for label in (incumbent, start))
    assert "Round 8: raced" in text


def test_races_failures_and_the_budget_are_told():
    history = begin(["fsdp2", "ddp", "ddp-int8"])
    proposal = proposal_of(history, DDP, KEPT)
    trial = trial_of(proposal, **{f"_{KEPT.hash()}": "timeout", f"_{DDP.hash()}": 0.5})
    text = describe(conclude(history, proposal, trial, AGENT), AGENT, LIMIT)
    assert re.search(r"ddp, none \[run ddp\]: step 0\.50\d times the start's \(95 % 0", text)
    assert "[round 1]: no figures, the trial ended with outcome timeout." in text
    assert (
        "Round 1: raced ddp, none, fsdp2, none, reshard_after_forward=false; decision accept."
        in text
    )
    assert "Incumbent: ddp, none [run ddp]." in text
    assert "at most 1.030 times the start's; peak memory at most 4000 MB per rank." in text
    assert f"Trials left: {AGENT.budget - 1} of {AGENT.budget}." in text


def test_a_prediction_says_what_is_unknown():
    prediction = make_candidate(engine="manual").prediction
    assert describe_prediction(prediction) == (
        "predicted: step 40.00 ms (95 % 36.50 to 43.50), peak memory 812 MB per rank, perplexity "
        "1.002 times the start's (its codecs: run fsdp2-bf16)"
    )
    nothing = {"step_ms": None, "low_ms": None, "high_ms": None, "perplexity_ratio": None}
    unknown = prediction.model_copy(update={**nothing, "note": "no run"})
    assert (
        "step unknown, peak memory 812 MB per rank, perplexity unknown (no"
        in describe_prediction(unknown)
    )


def test_machine_and_data_are_facts_without_names_of_files():
    hardware = Hardware(
        cpu="A processor",
        cores=2,
        caches_kb={"L1 data": 32, "L2 unified": 1024},
        memory_gb=8.59,
        gpus=[Gpu(name="H100", memory_gb=80.0, link="NVLink 4", peak_tflops=989.4)],
        connections=[Connection(world_size=2, link="100mbit", mb_per_s=12.1, latency_us=900.0)],
    )
    machine = describe_machine(hardware)
    assert machine == (
        "Machine: cpu A processor; cores 2; caches_kb L1 data 32, L2 unified 1024; memory_gb 8.59; "
        "gpus (name H100, memory_gb 80, link NVLink 4, peak_tflops 989.4); connections (world_size "
        "2, link 100mbit, mb_per_s 12.1, latency_us 900)."
    )
    train = {"documents": 90, "tokens": 9000, "bytes_per_token": 3.3}
    shape = {"length": {"p50": 80.0, "p90": 151.0, "p99": 400.0}, "pad_ratio": 0.0}
    statistics = {"vocabulary": 300, "entropy_bits": 6.789, **shape}
    data = describe_data({"train": train, **statistics})
    assert data.startswith("Data: 9000 training tokens of 90 documents, 3.30 bytes per token, vo")
    assert data.endswith("p99 400; padding 0 %; entropy of token frequencies 6.79 bits.")
    unknown = describe_data({"train": train | {"bytes_per_token": None}, **statistics})
    assert unknown == data.replace("3.30 bytes per token, ", "")
    lines = describe(begin(), AGENT, LIMIT, (machine, data)).splitlines()
    assert lines[1:3] == [machine, data]
