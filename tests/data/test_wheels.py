import zipfile

import pytest

from shardlab.core.errors import UserError
from shardlab.data import sources as wheels


@pytest.mark.long
def test_a_failed_download_is_one_line_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    # another file of that name is never read
    other = tmp_path / "wheels" / "gensim-4.4.0.whl"
    other.parent.mkdir()
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("gensim/data.txt", "hello")
    with pytest.raises(UserError, match=r"gensim==4\.4\.0.*connect this machine") as caught:
        wheels.fetch("gensim", tmp_path)
    assert "\n" not in str(caught.value)
    assert [path.name for path in other.parent.iterdir()] == [other.name]
