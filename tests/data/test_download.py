"""Downloads of text from a real server on this machine."""

import gzip
import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shardlab.core.errors import UserError
from shardlab.data.corpus_file import read_corpus
from shardlab.data.settings import Data
from shardlab.data.sources import prepare


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def end_headers(self):
        if self.path.endswith(".gz"):
            self.send_header("Content-Encoding", "gzip")
        super().end_headers()


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_address_is_downloaded_once_and_read_like_the_file(tmp_path, server):
    folder, address = server
    records = [{"id": "a", "title": "One", "text": "first"}, {"id": "b", "text": "second"}]
    (folder / "my text.json").write_text(json.dumps(records))
    corpus, data = tmp_path / "corpus.json", Data(source="json", path=f"{address}/my%20text.json")
    source = prepare(data, corpus, tmp_path / "work")
    assert [document.content for document in read_corpus(corpus)] == ["One\nfirst", "second"]
    assert source["url"] == data.path
    (folder / "my text.json").unlink()
    assert prepare(data, corpus, tmp_path / "work") == source  # it is kept


def test_a_packed_file_is_unpacked_once_whatever_the_server_says_of_it(tmp_path, server):
    folder, address = server
    (folder / "text.json.gz").write_bytes(gzip.compress(b'[{"text": "first"}]'))
    corpus, data = tmp_path / "corpus.json", Data(source="json", path=f"{address}/text.json.gz")
    prepare(data, corpus, tmp_path / "work")
    assert [document.content for document in read_corpus(corpus)] == ["first"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("{server}/absent.json", "status 404"),
        ("{server}:1/x.json", "InvalidURL"),
        ("http://[", "ValueError"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(tmp_path, server, address, reason):
    data = Data(source="json", path=address.format(server=server[1]))
    with pytest.raises(UserError) as caught:
        prepare(data, tmp_path / "corpus.json", tmp_path / "work")
    assert f"cannot be downloaded ({reason})" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "corpus.json").exists()
