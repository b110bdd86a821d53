import io
import re
import tempfile
import zipfile
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.core.files import sha256_of_file
from shardlab.data import wheels

OTHER = Path("/dev/shm")


@pytest.fixture
def no_index(monkeypatch):
    """pip with nowhere to fetch from, two attempts and no pause between them."""
    monkeypatch.setattr(wheels, "_ATTEMPTS", 2)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(wheels.time, "sleep", lambda seconds: None)


def make_wheel(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny/data.txt", content)


def pin(monkeypatch, tmp_path, digest):
    pins = tmp_path / "pins.txt"
    pins.write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(wheels, "_PINS", pins)


def test_failed_download_is_one_line_with_the_fix(tmp_path, no_index):
    with pytest.raises(UserError, match=r"gensim==4\.4\.0.*connect this machine") as caught:
        wheels.fetch("gensim", tmp_path)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "wheels").iterdir())


def test_a_kept_wheel_is_read_without_pip(tmp_path, monkeypatch, no_index):
    path = tmp_path / "wheels" / "tiny-1.0.whl"
    make_wheel(path, "hello")
    pin(monkeypatch, tmp_path, sha256_of_file(path))
    with wheels.open_member("tiny", "tiny/data.txt", tmp_path) as file:
        assert io.TextIOWrapper(file).read() == "hello"


def test_a_wheel_with_another_hash_is_never_read(tmp_path, monkeypatch, no_index):
    path = tmp_path / "wheels" / "tiny-1.0.whl"
    make_wheel(path, "hello")
    pin(monkeypatch, tmp_path, "0" * 64)
    with pytest.raises(UserError, match=r"cannot download tiny==1\.0"):
        wheels.fetch("tiny", tmp_path)


def test_every_wheel_is_pinned_by_version_and_hash():
    lines = [line for line in wheels._PINS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 3
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", s) for s in lines)


def installable(folder):
    """Write the smallest wheel that pip downloads."""
    folder.mkdir()
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        file.writestr(
            "tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("tiny-1.0.dist-info/RECORD", "")
        file.writestr("tiny/data.txt", "hello")
    return path


@pytest.mark.skipif(not OTHER.is_dir(), reason="no second file system")
def test_temporary_files_may_be_on_another_file_system(tmp_path, monkeypatch, no_index):
    path = installable(tmp_path / "index")
    pin(monkeypatch, tmp_path, sha256_of_file(path))
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    with tempfile.TemporaryDirectory(dir=OTHER) as other:
        if Path(other).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip(f"{OTHER} is on the file system of the tests")
        monkeypatch.setenv("TMPDIR", other)
        monkeypatch.setattr(tempfile, "tempdir", other)
        assert sha256_of_file(wheels.fetch("tiny", tmp_path)) == sha256_of_file(path)
    assert [kept.name for kept in (tmp_path / "wheels").iterdir()] == ["tiny-1.0.whl"]
