"""`shardlab plan`: one screen that begins with the answer, and mistakes in one line."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.choose.plan_answer import Plan
from shardlab.choose.rank import MARGIN
from shardlab.cli import main

GPT2 = ["gpt2", "--nodes", "2x4", "--device", "a100-40g", "--link", "10gbit", "--seq", "512"]
LLAMA = ["llama-3-8b", "--nodes", "2x8", "--device", "a100-80g", "--link", "10gbit"]
CPU = ["--device", "cpu", "--peak", "1", "--memory", "64", "--bandwidth", "100"]
CPU += ["--efficiency", "80", "50"]
SMALL = ["tiny", "--device", "a100-40g", "--seq", "64", "--batch", "2"]


def printed(capsys, *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def test_the_page_shows_what_its_first_command_prints(capsys):
    page = (Path(__file__).parents[1] / "docs/tutorials/plan.md").read_text()
    command, output = re.findall(r"^```(?:sh)?\n(.*?)^```$", page, re.DOTALL | re.M)[:2]
    assert printed(capsys, *shlex.split(command)[2:]) == output


def plan_of(capsys, *arguments: str) -> Plan:
    return Plan.model_validate(json.loads(printed(capsys, *arguments, "--json")), strict=False)


@pytest.mark.parametrize(
    "arguments",
    [
        [*LLAMA, "--tokens", "15T", "--price", "1.5"],
        ["gpt2", "--nodes", "4x1", "--device", "l4", "--link", "1gbit", "--seq", "1024"],
        ["llama-3-70b", "--nodes", "64x8", "--device", "h100-80g", "--link", "3200gbit"],
        SMALL,
    ],
    ids=str,
)
def test_a_plan_is_one_screen(arguments, capsys):
    shown = printed(capsys, *arguments).splitlines()
    assert len(shown) <= 40
    # a line of code stays whole, to be pasted
    assert max(len(line) for line in shown if not line.startswith("  handle")) <= 100
    assert shown[0].startswith("Use ")


def test_the_answer_names_the_best_without_loss_and_where_loss_breaks_even(capsys):
    plan = plan_of(capsys, *GPT2)
    assert plan.one_node is not None and plan.one_device is not None
    fitting = [row for row in plan.strategies if row.fits and not row.host]
    known = [row for row in fitting if not row.lossy] + [plan.one_node, plan.one_device]
    highest = max(row.tokens_per_s.middle for row in known)
    # nothing without loss is more than the margin faster than what is named
    [named, changes] = plan.best
    speeds = {(row.name, row.devices): row.tokens_per_s.middle for row in known}
    speed = speeds[named.strategy, named.devices]
    assert speed * (1 + MARGIN) >= highest
    assert plan.answer.startswith(f"Use {named.strategy}")
    lossy = {row.name: row for row in fitting if row.lossy}
    assert {*plan.break_even} == {*lossy}
    for name, even in plan.break_even.items():
        # other settings of one node or device may be faster than what is named, by the margin
        assert 1 / (1 + MARGIN) <= even * highest / lossy[name].tokens_per_s.middle < 1 + 1e-9
    # of what changes training the mildest that is about as fast as the fastest
    most = max(plan.break_even.values())
    about = [name for name, even in plan.break_even.items() if even * (1 + MARGIN) >= most]
    assert changes.strategy == next(name for name in lossy if name in about)
    assert changes.attach == lossy[changes.strategy].attach
    assert (
        f"{changes.strategy}, which changes training, reaches the same loss sooner if"
        in plan.answer
    )
    assert not (plan.one_node.lossy or plan.one_device.lossy)


def test_a_slow_link_is_not_worth_its_second_node(capsys):
    assert "on one node alone" in plan_of(capsys, *GPT2, "--link", "100mbit").answer
    assert "x one node alone" in plan_of(capsys, *GPT2, "--link", "3200gbit").answer


def test_hours_and_price_follow_from_the_tokens(capsys):
    plan = plan_of(capsys, *GPT2, "--tokens", "2G", "--price", "3")
    for cost in plan.best:
        assert cost.hours is not None and cost.price is not None
        assert cost.hours[0] * cost.tokens_per_day[1] == pytest.approx(24 * 2e9)
        assert cost.price[1] == pytest.approx(3 * cost.devices * cost.hours[1])


def test_ranges_hold_the_middle_and_memory_is_told_apart(capsys):
    for each in plan_of(capsys, *GPT2).strategies:
        assert each.step_s.low <= each.step_s.middle <= each.step_s.high
        assert each.device_bytes == each.states + each.activations + each.window
        assert (each.host > 0) == (each.name == "slide")
        assert 0 < each.utilisation <= 1 + 1e-9
        assert list(each.link_rates) == (["50", "75", "90"] if each.fits else [])


def test_a_cpu_is_described_by_options(capsys):
    plan = plan_of(capsys, "small", "--nodes", "2x1", "--link", "100mbit", "--seq", "64", *CPU)
    assert {"ddp", "fsdp2", "slide"} <= {each.name for each in plan.strategies}
    assert "fp32 at 50 to 80 % of its peak (as given)" in plan.setup


def test_a_model_of_transformers_is_planned_as_its_closed_form(capsys, tmp_path, monkeypatch):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [str(tmp_path), *SMALL[1:]]
    closed = plan_of(capsys, *arguments)
    monkeypatch.setattr("shardlab.plan.read_decoder", lambda *_: None)
    assert plan_of(capsys, *arguments) == closed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SMALL, "--device", "a100"], "--device 'a100': known are a100-40g, a100-80g"),
        ([*SMALL, "--device", "tpu"], "known are a100-40g, "),
        ([*SMALL, "--nodes", "2"], "expected nodes x devices, as in 2x8"),
        ([*SMALL, "--nodes", "2x8"], "--link"),
        ([*SMALL, "--nodes", "2x8", "--link", "10"], "link rate '10'"),
        ([*SMALL, "--nodes", "1x8", "--inside", "nvlnk"], "--inside 'nvlnk': known are nvlink"),
        (["tiny", "--device", "l4", "--nodes", "1x2", "--inside", "nvlink"], "known are nvlink2, "),
        ([*SMALL, "--efficiency", "0.4", "0.5"], "expected percent, from 1 to 100"),
        ([*SMALL, "--param-dtype", "fp16"], "a100-40g has bf16, fp32"),
        ([*SMALL, "--device", "cpu"], "describe it, as by --peak 0.2 "),
        ([*SMALL, "--peak", "3"], "are for --device cpu"),
        ([*SMALL, "--tokens", "many"], "expected a number above 0 (found 'many')"),
        ([*SMALL, "--delay-ms", "0"], "expected a number above 0 (found '0')"),
        ([*SMALL, "--host-memory", "64g"], "expected a number above 0 (found '64g')"),
        ([*SMALL, "--batch", "0"], "batch_size: input should be greater than or equal to 1"),
        (
            [*SMALL, "--batch", "2000000"],
            "batch_size: input should be less than or equal to 1048576",
        ),
        ([*SMALL, "--seq", "1"], "sequence_length: input should be greater than or equal to 2"),
        ([*SMALL, "--link", "10gbit"], "--link is for several nodes: raise --nodes"),
        ([*SMALL, "--inside", "pcie4"], "--inside is for nodes of several devices"),
        ([*SMALL, "--price", "3"], "--price is for a number of tokens: give --tokens"),
        ([*SMALL[:-4], *CPU, "--nodes", "1x2"], "several devices of a node need --inside"),
        (["gpt2", *SMALL[1:], "--vocabulary", "64"], "--vocabulary is for presets"),
        (["gpt2", *SMALL[1:], "--seq", "2048"], "gpt2 has 1024 positions: give so many or fewer"),
        (
            ["llama-3-70b", "--nodes", "1x2", "--device", "l4", "--seq", "32768"],
            "llama-3-70b fits on no strategy: ",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and words in said.err


_GEMMA = {
    "model_type": "gemma2",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 99,
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "unheard-of"}, "cannot load"),
        ({"model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 64}, "has experts"),
        ({**_GEMMA, "hidden_size": 0}, "has no parameters"),
        ({**_GEMMA, "model_type": "llama", "vocab_size": 10**400}, "sizes that no number holds"),
    ],
)
def test_a_model_that_cannot_be_planned_is_one_line(config, words, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), *SMALL[1:]])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_host_memory_that_few_nodes_have_is_marked(capsys):
    """Of 8 devices with 80 GiB: 12 bytes per parameter and more are beyond 1.5 times that."""
    large = ["llama-3-70b", "--nodes", "1x8", "--device", "a100-80g"]
    assert plan_of(capsys, *large).answer.count("GB of host memory (rare)") == 1
    assert "(rare)" not in plan_of(capsys, *large, "--host-memory", "2000").answer
    small = plan_of(capsys, "llama-3-8b", *large[1:])
    assert not any(each.host_rare for each in small.strategies)


def test_what_fits_nowhere_names_the_next_command(capsys):
    model = ["llama-3-70b", "--device", "a100-80g", "--seq", "2048", "--batch", "1"]
    with pytest.raises(SystemExit):
        main(["plan", *model, "--nodes", "1x8", "--host-memory", "100"])
    said = capsys.readouterr().err
    assert "try --nodes 2x8" in said or "try --nodes 4x8" in said
    main(["plan", *model, "--nodes", *said.split("--nodes ")[1].split()])


def test_a_name_that_is_nowhere_is_answered_by_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "llama3-8b", *SMALL[1:]])
    assert "did you mean 'llama-3-8b'?" in capsys.readouterr().err


@pytest.mark.long
def test_neither_torch_nor_transformers_is_needed():
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'scipy', 'pandas'): sys.modules[name] = None\n"
        "from shardlab.cli import main\n"
        f"main({['plan', *GPT2]!r})\n"
        "main(['plan', 'somebody/some-model', '--device', 'l4'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("Use ")
    assert done.returncode == 2 and "pip install 'shardlab[hf]'" in done.stderr
