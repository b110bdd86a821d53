"""The stage `validate` says what training made of the perplexity."""

import shutil
from pathlib import Path

import pytest

from shardlab.core.files import write_json
from shardlab.results.train_result import Validation
from stages import validate
from stages.sections import Sections

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("model", "figures", "said"),
    [
        ("{preset: tiny}", (2117.61, 622.84), "perplexity 2117.6 (untrained) → 622.8"),
        ("{pretrained: gpt2}", (31.0, 29.96), "perplexity 31.0 (start) → 30.0"),
        ("{preset: tiny}", (500.0, None), "perplexity 500.0 (untrained) → not finite"),
    ],
)
def test_perplexity_before_and_after_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    figures: tuple[float, float | None],
    said: str,
) -> None:
    shutil.copy(ROOT / "params/quick.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    write_json("results/train/fsdp2/seed0/metrics.json", {})
    start, end = figures
    found = Validation(
        val_loss=6.0, val_ppl=end, val_bits_per_byte=2.0, val_tokens=9, untrained_ppl=start
    )
    # the tokens and the model are not what is tested
    monkeypatch.setattr(validate, "refuse_other_tokens", lambda params: None)
    monkeypatch.setattr(validate, "validate_run", lambda model, output, *_: found.to_file(output))
    overrides = [f"model={model}", "tokenize={vocabulary: null}"]
    validate.main(Sections(overrides=overrides), "fsdp2")
    assert capsys.readouterr().err == f"validate fsdp2 seed 0: {said}\n"
