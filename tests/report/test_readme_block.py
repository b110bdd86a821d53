import pytest

from shardlab.core.errors import UserError
from stages.readme import BEGIN, END, main
from stages.sections import Sections

HEADLINE = "| run | step |\n| --- | ---: |\n| fsdp2 | 48 |\n\nMeasured here.\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("{}")
    (tmp_path / "results/report").mkdir(parents=True)
    (tmp_path / "results/report/headline.md").write_text(HEADLINE)
    return tmp_path


def test_only_the_block_changes(project):
    before, after = b"# A\r\n\ttext \xc3\xa9\n", b"\n\n## B\r\nend without newline"
    readme = project / "README.md"
    readme.write_bytes(before + f"{BEGIN}\nold\n{END}".encode() + after)
    main(Sections())
    text = readme.read_bytes()
    assert text.startswith(before)
    assert text.endswith(after)
    written = (project / "results/report/readme.md").read_text()
    assert written == f"{BEGIN}\n{HEADLINE}{END}\n"
    assert written.encode().strip() == text[len(before) : len(text) - len(after)]


@pytest.mark.parametrize("text", ["none", BEGIN, f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_markers_must_occur_exactly_once(project, text):
    readme = project / "README.md"
    readme.write_text(text)
    with pytest.raises(UserError, match=r"README\.md: expected .* add the two lines"):
        main(Sections())
    assert readme.read_text() == text
    assert not (project / "results/report/readme.md").exists()


def test_missing_files_and_a_headline_with_a_marker_are_refused(project):
    with pytest.raises(UserError, match=r"README\.md: no such file"):
        main(Sections())
    headline = project / "results/report/headline.md"
    headline.write_text(f"a {END} b")
    with pytest.raises(UserError, match="marker"):
        main(Sections())
    headline.unlink()
    with pytest.raises(UserError, match=r"headline\.md: no such file: run shardlab report"):
        main(Sections())
