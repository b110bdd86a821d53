"""`shardlab plan --price gpuhunt`: the cheapest node of gpuhunt's catalogue, here a local copy."""

import json
import socket
import sys
import zipfile
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.core.errors import UserError
from shardlab.predict.devices import DEVICES
from shardlab.predict.prices import catalogue_name, cheapest_offer

PLAN = ["plan", "gpt2", "--device", "a100-80g", "--seq", "512", "--tokens", "1G"]
COLUMNS = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size"
AWS = ["p4d,us-east-1,32.0,96,1152,8,A100,40.0,False,"]
AWS += ["p4de,us-east-1,40.0,96,1152,8,A100,80.0,False,"]
RUNPOD = ["8x,CA-MTL-1,24.0,96,1152,8,A100,80.0,False,"]
RUNPOD += ["8x-spot,CA-MTL-1,8.0,96,1152,8,A100,80.0,True,"]
RUNPOD += ["1x,CA-MTL-1,2.0,12,144,1,A100,80.0,False,"]
RUNPOD += ["h200,CA-MTL-1,1.0,12,144,8,H200,141.0,False,"]


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout that gpuhunt downloads from, of two providers; the others have none."""
    pytest.importorskip("gpuhunt")
    for provider, rows in (("aws", AWS), ("runpod", RUNPOD)):
        folder = tmp_path / provider / "20261127-17"
        folder.mkdir(parents=True)
        (folder.parent / "version").write_text("20261127-17\n")
        with zipfile.ZipFile(folder / "catalog.zip", "w") as archive:
            archive.writestr(f"{provider}.csv", "\n".join([COLUMNS, *rows]))
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", tmp_path.as_uri())


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize(
    ("nodes", "price", "instance"), [("1x1", 2.0, "1x"), ("1x8", 3.0, "8x")], ids=str
)
def test_the_price_is_of_the_cheapest_node_on_demand(nodes, price, instance, capsys):
    main([*PLAN, "--nodes", nodes, "--price", "gpuhunt", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["offer"] == {
        "price": price,
        "provider": "runpod",
        "instance": instance,
        "region": "CA-MTL-1",
        "catalogue": "20261127-17",
        "providers": 2,
    }
    main([*PLAN, "--nodes", nodes, "--price", str(price), "--json"])
    given = json.loads(capsys.readouterr().out)
    assert given["best"] == plan["best"] and given["offer"] is None


@pytest.mark.usefixtures("catalogue")
def test_a_plan_says_the_offer_and_the_date(capsys):
    main([*PLAN, "--price", "gpuhunt"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "price: 2 USD per device-hour on demand, 1x of runpod in CA-MTL-1" in shown
    assert "gpuhunt's catalogue of 2026-11-27, of 2 providers" in shown


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "1x2"], "of nodes with 2 a100-80g it has only nodes of 1, 8: change --nodes"),
        (["--device", "l4"], "of nodes with 1 l4 it has none, or give --price in a number"),
    ],
    ids=str,
)
def test_a_node_that_nobody_offers_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit):
        main([*PLAN, "--price", "gpuhunt", *arguments])
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_cpu_has_no_price_in_a_catalogue(capsys):
    cpu = ["--device", "cpu", "--peak", "1", "--memory", "64", "--bandwidth", "100"]
    with pytest.raises(SystemExit):
        main([*PLAN, *cpu, "--efficiency", "50", "80", "--price", "gpuhunt"])
    assert "no offer of --device cpu: give --price in a number" in capsys.readouterr().err


def test_no_network_is_one_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gpuhunt")
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", (tmp_path / "absent").as_uri())
    with pytest.raises(SystemExit):
        main([*PLAN, "--price", "gpuhunt"])
    said = capsys.readouterr().err
    assert "connect this machine to the internet, or give --price in a number" in said
    assert said.count("\n") == 1


def test_a_server_that_does_not_answer_is_one_line(monkeypatch):
    pytest.importorskip("gpuhunt")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", url)
        with pytest.raises(UserError, match=r"timed out; connect this machine"):
            cheapest_offer("l4", 1, timeout_s=0.2)
    assert socket.getdefaulttimeout() is None


def test_without_the_package_the_line_has_its_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(SystemExit):
        main([*PLAN, "--price", "gpuhunt"])
    assert capsys.readouterr().err.endswith("--price gpuhunt: pip install 'shardlab[prices]'\n")


def test_gpuhunt_knows_every_device():
    gpuhunt = pytest.importorskip("gpuhunt")
    names = {accelerator.name.upper() for accelerator in gpuhunt.KNOWN_ACCELERATORS}
    assert {catalogue_name(device) for device in DEVICES} <= names
