from shardlab.comm.ledger import Ledger


def test_a_line_says_what_was_sent_and_saved() -> None:
    ledger = Ledger()
    assert str(ledger) == "nothing sent yet"
    gradients, weights = ledger.accounts["gradients"], ledger.accounts["weights"]
    gradients.bytes_raw, gradients.bytes_wire = 40e6, 10e6
    assert str(ledger) == "sent 10.0 of 40.0 MB, 75.0 % saved: gradients 4 x"
    weights.bytes_raw, weights.bytes_wire = 80e6, 80e6
    assert str(ledger) == (
        "sent 90.0 of 120.0 MB, 25.0 % saved: gradients 4 x, weights uncompressed"
    )
    weights.bytes_wire = 81e6 * 1.5
    assert "9.6 % more: gradients 4 x, weights 0.658 x" in str(ledger)


def test_small_messages_are_counted_in_kilobytes() -> None:
    ledger = Ledger()
    account = ledger.accounts["gradients"]
    account.bytes_raw, account.bytes_wire = 1.2e6, 40e3
    assert str(ledger) == "sent 40.0 of 1,200.0 kB, 96.7 % saved: gradients 30 x"


def test_what_was_uncompressed_has_its_reason() -> None:
    ledger = Ledger()
    account = ledger.accounts["gradients"]
    account.bytes_raw = account.bytes_wire = 2e6
    account.uncompressed["torch.float64"] += 2
    account.uncompressed["warm-up"] += 1
    assert str(ledger) == "sent 2.0 of 2.0 MB, nothing saved: gradients uncompressed (float64)"


def test_a_line_names_what_most_of_the_bytes_were() -> None:
    ledger = Ledger()
    gradients, weights = ledger.accounts["gradients"], ledger.accounts["weights"]
    gradients.bytes_raw = 40e6
    gradients.add_sent(1e6, 0, "float32, summed in float32")
    gradients.add_sent(9e6, 0, "int8, summed in float32")
    weights.bytes_raw = 80e6
    weights.add_sent(80e6, 0, "bfloat16")
    assert str(ledger).endswith(
        "gradients 4 x (int8, summed in float32), weights uncompressed (bfloat16)"
    )
    gradients.bytes_raw = 10e6
    gradients.uncompressed["warm-up"] += 1
    assert "uncompressed (warm-up; int8, summed in float32), " in str(ledger)


def test_metrics_of_messages_without_bytes_are_numbers() -> None:
    ledger = Ledger()
    ledger.accounts["gradients"].bytes_raw = 8.0
    assert ledger.metrics()["comm/ratio"] == ledger.metrics()["comm/gradients_ratio"] == 1


def test_counts_are_continued_from_those_before_formats_were_known() -> None:
    ledger, other = Ledger(), Ledger()
    ledger.accounts["gradients"].add_sent(5.0, 0, "int8, summed in float32")
    sums = ledger.sums()
    other.load_sums(sums)
    assert other.sums() == sums
    for values in sums.values():
        del values["formats"]
    other.load_sums(sums)
    assert other.summary()["gradients"]["formats"] == {}
    assert other.summary()["gradients"]["bytes_wire"] == 5.0
