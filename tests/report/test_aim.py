"""The aim of compression: both sides of it, for gradients and for all traffic."""

import pytest

from shardlab.core.numbers import ABSENT
from shardlab.report.aim import aim
from shardlab.report.sections.runs import comparison_table, quality
from tests.evidence_factory import make_evidence
from tests.record_factory import FIGURES, make_record, make_records


def lines_of(records):
    return aim(make_evidence(records).compared, "fsdp2")[1]


@pytest.mark.parametrize(
    ("ratio", "perplexity", "line"),
    [
        (2.0, 1.0, "met by fsdp2-int8 (2.00 times, up to 0.0 %)."),
        (9.0, 1.0099, "met by fsdp2-int8 (9.00 times, up to +1.0 %)."),
        (1.99, 1.0, "not met in bytes by fsdp2-int8 (1.99 times, up to 0.0 %)."),
        (4.0, 1.0101, "not met in perplexity by fsdp2-int8 (4.00 times, up to +1.0 %)."),
        (1.5, 1.2, "not met in bytes and perplexity by fsdp2-int8 (1.50 times, up to +20.0 %)."),
    ],
)
def test_the_aim_has_two_sides(ratio, perplexity, line):
    records = make_records(["fsdp2"])
    for record in [*records]:
        changes = {"val_ppl": record.val_ppl * perplexity, "compression_ratio": ratio}
        records.append(make_record("fsdp2-int8", record.seed, **changes))
    none = "none; " if "not met" in line else ""
    expected = f"All traffic: met by {none}{line}" if none else f"All traffic: {line}"
    assert lines_of(records)[1] == expected


def test_gradients_and_all_traffic_are_judged_apart():
    gradients, traffic = lines_of(make_records(["fsdp2", "ddp-int8", "fsdp2-int8"]))
    # weights, which fsdp2 alone sends, are not compressed
    assert gradients.startswith(f"Gradients: met by ddp-int8 ({FIGURES['ddp-int8'][1]} times")
    assert "fsdp2-int8 (3.87 times" in gradients and "not met" not in gradients
    assert traffic.startswith("All traffic: met by ddp-int8 (3.88 times")
    assert "not met in bytes by fsdp2-int8 (1.33 times" in traffic


def test_the_end_of_the_interval_counts_and_one_seed_has_none():
    records = make_records(["fsdp2"], 2)
    # half a percent more in the mean, and seeds far apart
    for record, rise in zip([*records], (1.0, 1.01), strict=True):
        records.append(make_record("fsdp2-int8", record.seed, val_ppl=record.val_ppl * rise))
    assert "not met in perplexity by fsdp2-int8 (3.87 times, up to" in lines_of(records)[0]
    single = lines_of(make_records(["fsdp2", "fsdp2-int8"], 1))[0]
    assert "not met in perplexity by fsdp2-int8 (3.87 times, no interval)" in single


def test_a_run_that_diverged_does_not_keep_its_perplexity():
    lost = dict.fromkeys(("train_loss", "val_loss", "val_ppl", "val_bits_per_byte"))
    runs = [make_record("ddp-int8", seed, **lost, diverged_at=7) for seed in range(3)]
    line = lines_of([*make_records(["fsdp2"]), *runs])[0]
    assert "not met in perplexity by ddp-int8 (3.88 times, diverged at step 7)" in line


def test_the_section_of_quality_states_it_where_a_run_is_compressed():
    section = quality(make_evidence(make_records(["fsdp2", "fsdp2-int8"])))
    assert "2 to 4 times less traffic" in section.sentences[0] and len(section.items) == 2
    section = quality(make_evidence(make_records(["fsdp2", "ddp"])))
    assert not section.sentences and not section.items


def test_the_comparison_has_all_that_compressors_differ_in():
    table = comparison_table(make_evidence(make_records()))
    headings = {column.heading for column in table.columns}
    assert {"ratio", "gradients ratio", "residual, norm", "communication, % of step"} <= headings
    assert {"perplexity change, %", "peak memory, MB/rank"} <= headings
    column = [c.heading for c in table.columns].index("residual, norm")
    shown = {row[0]: row[column] for row in table.rows}
    assert shown["fsdp2-topk"] == "1.30" and shown["fsdp2-int8"] == ABSENT
    assert "residual, norm" not in {
        column.heading
        for column in comparison_table(make_evidence(make_records(["fsdp2", "ddp"]))).columns
    }
