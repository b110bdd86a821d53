import json

import pytest

from shardlab.report.aggregate import codec_texts, traffic, uncompressed
from shardlab.report.section import tables_of
from shardlab.report.sections import messages
from shardlab.strategy.strategy import parse_strategy
from tests.evidence_factory import make_evidence
from tests.record_factory import STRATEGIES, make_record, make_records


def with_account(record, kind, **changes):
    ledger = {**record.ledger, kind: {**record.ledger[kind], **changes}}
    return record.model_copy(update={"ledger": ledger})


@pytest.mark.parametrize("run", STRATEGIES)
def test_the_kinds_add_up_to_the_whole(run):
    record = make_record(run)
    found = traffic(record)
    for what in ("bytes_raw", "bytes_wire"):
        whole = found[f"gradients_{what}"] + found[f"weights_{what}"]
        assert whole == pytest.approx(getattr(record, what))


def test_ratio_is_of_one_kind_and_absent_where_nothing_moved():
    found = traffic(make_record("ddp-int8"))
    assert found["gradients_ratio"] == pytest.approx(3.88)
    assert found["weights_ratio"] is None
    assert traffic(make_record("fsdp2-int8"))["weights_ratio"] == 1


def test_bytes_between_nodes_are_those_of_both_kinds():
    record = make_record("fsdp2-int8")
    assert traffic(record)["bytes_between_nodes"] is None
    for kind, moved in (("gradients", 3e5), ("weights", 2e5)):
        record = with_account(record, kind, bytes_between_nodes=moved)
    assert traffic(record)["bytes_between_nodes"] == 5e5


def test_uncompressed_messages_are_means_over_all_seeds():
    one, other = make_record("fsdp2", 0), make_record("fsdp2", 1)
    one = with_account(one, "gradients", uncompressed={"warm-up": 3.0, "not float32": 1.0})
    other = with_account(other, "gradients", uncompressed={"warm-up": 1.0})
    other = with_account(other, "weights", uncompressed={"not float32": 4.0})
    assert json.loads(uncompressed([one, other])) == {
        "gradients, not float32": 0.5,
        "gradients, warm-up": 2.0,
        "weights, not float32": 2.0,
    }


def test_both_codecs_have_their_options():
    document = {
        "gradients": {
            "codec": "int4:group=64,levels=nf4",
            "between_nodes": "topk:density=0.05",
            "error_feedback": True,
            "residual": "bf16",
        },
        "weights": {"codec": "fp8"},
    }
    assert codec_texts(parse_strategy(document)) == {
        "gradients_codec": "int4:group=64,levels=nf4, topk:density=0.05 between nodes",
        "weights_codec": "fp8:format=e4m3",
        "error_feedback": "bf16",
    }
    assert set(codec_texts(parse_strategy({"engine": "ddp"})).values()) == {"none"}


def test_a_reader_sees_every_figure_of_the_ledger():
    strategy = parse_strategy(
        {
            "gradients": {"codec": "int4", "error_feedback": True},
            "weights": {"codec": "int8", "minimum_size": 0},
        }
    )
    records = make_records(["fsdp2"])
    records += [
        with_account(
            make_record("both", seed, strategy=strategy.model_dump(mode="json")),
            "gradients",
            bytes_raw=2e6,
            bytes_wire=2.5e5,
            bytes_between_nodes=1e5,
            uncompressed={"fewer than 1024 elements": 2.0},
        )
        for seed in range(3)
    ]
    evidence = make_evidence(records)
    shown = {
        column.heading: cell
        for table in tables_of([messages.traffic(evidence), messages.codec_statistics(evidence)])
        for column, cell in zip(table.columns, table.rows[1], strict=True)
    }
    assert shown["gradients codec"] == "int4:group=128"
    assert shown["weights codec"] == "int8:group=128"
    assert shown["error feedback"] == "fp32"
    assert (shown["gradients raw, MB/step"], shown["gradients wire, MB/step"]) == ("2.00", "0.250")
    assert (shown["gradients ratio"], shown["weights ratio"]) == ("8.00", "1.00")
    assert shown["between nodes, MB/step"] == "0.100"
    assert shown["sent uncompressed, messages/step"] == "gradients, fewer than 1024 elements: 2.00"
