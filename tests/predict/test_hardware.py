"""Hardware that a calibration ran on: from sysfs, torch and the calibration's own timings."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardlab.core.host import describe_host
from shardlab.predict.calibrate import detect
from shardlab.results.calibration_record import MemoryCost
from shardlab.results.hardware import Hardware
from tests.predict.timing_factory import made_calibration


def test_this_machine_is_detected() -> None:
    host = describe_host()
    found = detect(made_calibration().model_copy(update={"host": host}))
    assert (found.cpu, found.cores) == (host["cpu"], host["cores"])
    assert found.memory_gb == pytest.approx(host["memory_bytes"] / 1e9)
    assert len(found.gpus or []) == torch.cuda.device_count()
    assert found.numa_nodes and found.caches_kb is not None


def test_caches_and_rates_are_read(tmp_path: Path) -> None:
    files = {"level": "1", "type": "Data", "size": "48K"}
    folder = tmp_path / "devices/system/cpu/cpu0/cache/index0"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    copies = [
        MemoryCost(operation="copy", nbytes=n, seconds=[2e-3, n / 1e9]) for n in (10_000, 1_000_000)
    ]
    calibration = made_calibration().model_copy(update={"memory": copies})
    found = detect(calibration, tmp_path)
    assert found.caches_kb == {"L1 data": 48}
    assert found.copy_gb_per_s == pytest.approx(2.0)
    (connection,) = found.connections or []
    assert (connection.world_size, connection.link) == (2, "loopback")
    assert connection.mb_per_s > 0 and connection.latency_us > 0


def test_gpus_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: True)
    found = detect(made_calibration())
    expected = [("H100", 80.0, "peer access")] * 2
    assert [(gpu.name, gpu.memory_gb, gpu.link) for gpu in found.gpus or []] == expected
    assert found.memory_of_rank_gb(8) == 80.0


def test_what_is_given_replaces_what_was_detected() -> None:
    detected = Hardware(cpu="a", cores=2, memory_gb=8.0)
    assert detected.changed_by(Hardware()) == detected
    changed = detected.changed_by(Hardware(memory_gb=64.0))
    assert (changed.cpu, changed.cores, changed.memory_gb) == ("a", 2, 64.0)
    assert changed.memory_of_rank_gb(4) == 16.0
    assert Hardware().memory_of_rank_gb(4) is None
