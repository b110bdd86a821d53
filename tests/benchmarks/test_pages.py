"""Pages of figures say by what they were measured; processes are measured alone."""

import sys
from unittest.mock import patch

from benchmarks.common import best_times, interleaved_times, publish, text_table
from benchmarks.usage import fastest_usage


def test_a_page_has_its_command_revision_host_and_tables(tmp_path, capsys):
    table = text_table("Rates", ["what", "MB/s"], [["a | b", "3"]])
    page = tmp_path / "new" / "codecs.md"
    with patch.object(sys, "argv", ["codecs.py", "int8:group=128", "--out", "a folder"]):
        publish("Codecs compared.\n\nMore.", page, table, "A note.")
    text = page.read_text()
    assert text.startswith("# Codecs compared\n")
    assert "`python -m benchmarks.codecs int8:group=128 --out 'a folder'`" in text
    assert all(f"\n- {fact}: " in text for fact in ("Revision", "Host", "Software"))
    assert "## Rates\n\n| what | MB/s |\n| --- | --- |\n| a \\| b | 3 |\n" in text
    assert text.endswith("\nA note.\n") and "A note." in capsys.readouterr().out
    assert [path.name for path in page.parent.iterdir()] == ["codecs.md"]


def test_calls_take_turns_and_the_first_turn_is_untimed():
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = interleaved_times(ways, repetitions=2)
    assert calls == [*"ababab"] and [len(values) for values in seconds.values()] == [2, 2]
    assert best_times(ways, 1, clock=iter(range(100)).__next__) == {"a": 1, "b": 1}


def test_a_way_without_its_package_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "measured.py").write_text(
        "import sys\nfrom benchmarks.usage import print_usage\n"
        "if sys.argv[2] == 'absent': import no_such_package\n"
        "print_usage(lambda: sum(range(1000)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    usages = fastest_usage("measured", ["present", "absent"], [], repetitions=2)
    assert [*usages] == ["present"]
    assert usages["present"].peak_mb > 1 and len(usages["present"].cells()) == 3
