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
