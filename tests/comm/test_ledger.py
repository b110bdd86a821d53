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
