"""A study in miniature: matched, run, stopped, continued, and told in words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli
from pipeline.configuration import build, to_yaml
from pipeline.data.config import OBJECTIVES, ObjectiveConfig
from pipeline.evaluation import study as study_module
from pipeline.evaluation.config import StudyConfig
from pipeline.evaluation.matching import cost_of, matched
from pipeline.evaluation.study import plan_study
from pipeline.model.config import ModelConfig, resolve
from pipeline.training.config import PretrainConfig
from tests.training.jobs import finish, write_novels
from tests.training.test_finetune import reviews, write_rows


@pytest.mark.parametrize("size", ["mini", "small", "base"])
@pytest.mark.parametrize("rule", ["parameters", "flops"])
@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_families_are_matched_to_within_a_percent(family: Any, rule: Any, size: Any) -> None:
    reference = ModelConfig(family="decoder", size=size)
    objective = ObjectiveConfig(name=OBJECTIVES[family][0])
    model = resolve(matched(reference, family, rule, 8192, 256, objective))
    decoder = resolve(reference)
    assert (model.width, model.head_width) == (decoder.width, decoder.head_width)
    goal = cost_of(decoder, 8192, 256, ObjectiveConfig(name="causal"))
    found = cost_of(model, 8192, 256, objective)
    name = "flops" if rule == "flops" else "parameters"
    assert abs(getattr(found, name) / getattr(goal, name) - 1) <= 0.01


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    novels = write_novels(tmp_path / "novels")
    write_rows(tmp_path / "train.jsonl", reviews(160, 1))
    write_rows(tmp_path / "dev.jsonl", reviews(40, 2))
    common = "trainer:\n  accelerator: cpu\n  validate_every: 5\ntracking:\n  mode: disabled\n"
    (tmp_path / "pretrain.yaml").write_text(
        f"data:\n  corpus: [{novels}]\n  sequence_length: 32\n  batch_size: 8\n  workers: 1\n"
        f"  stores: {tmp_path}/stores\n"
        f"  new_tokenizer:\n    vocab_size: 400\nmodel:\n  width: 32\n{common}  samples_every: 0\n"
    )
    (tmp_path / "sentiment.yaml").write_text(
        f"task:\n  name: sentiment\ndata:\n  train: {tmp_path}/train.jsonl\n  validation: {tmp_path}/dev.jsonl\n"
        f"  sequence_length: 24\n  batch_size: 16\noptim:\n  lr: 3.0e-3\n{common}"
    )
    return {
        "size": "tiny",
        "seeds": "2",
        "pretrain": json.dumps([str(tmp_path / "pretrain.yaml")]),
        "pretrain_options": '{"trainer.max_steps": "4"}',
        "tasks": json.dumps([str(tmp_path / "sentiment.yaml")]),
        "task_options": '{"trainer.max_steps": "20"}',
        "run_dir": str(tmp_path / "study"),
    }


def command(settings: dict[str, Any]) -> list[str]:
    return ["compare", *(word for key, value in settings.items() for word in (f"--{key}", value))]


def test_a_study_is_run_continued_and_told(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[list[str]] = []

    def run(words: list[str]) -> int:
        if len(done) == 5:  # the machine goes down in the middle of the study
            done.append(words)
            return 75
        done.append(words)
        return finish(words, tmp_path / "out.txt") or 0

    monkeypatch.setattr(study_module, "run_command", run)
    assert cli.main(command(settings)) == 75
    first = len(done)
    assert cli.main(command(settings)) == 0, (tmp_path / "out.txt").read_text()
    finished = [tuple(words) for words in done[: first - 1]]
    assert not set(finished) & {tuple(words) for words in done[first:]}, "a finished job was done again"
    assert len(done) - 1 == 12
    told = capsys.readouterr().out
    assert told.count("sentiment: ") == 3 and "2 seeds" in told
    page = (tmp_path / "study" / "report.html").read_text()
    assert page.count("data:image/png;base64") >= 5 and not re.search(r'(src|href)="(?!data:)', page)
    assert "| sentiment | encoder | accuracy | dev | 2 |" in (tmp_path / "study" / "report.md").read_text()
    before = len(done)
    assert cli.main(command(settings)) == 0 and len(done) == before
    assert cli.main(command(settings | {"match": "flops"})) == 2
    assert "another match or size" in capsys.readouterr().err


def test_results_of_other_settings_are_never_reused(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = plan_study(build(StudyConfig, [], settings))
    cell = next(study.pretraining())
    config: Any = build(PretrainConfig, [Path(file) for file in cell.files], cell.given)
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(to_yaml(config))
    assert cli.main(command(settings | {"dry_run": "true"})) == 0
    capsys.readouterr()
    changed = settings | {"pretrain_options": '{"trainer.max_steps": "5"}'}
    assert cli.main(command(changed)) == 2
    assert "was done with another trainer.max_steps" in capsys.readouterr().err


def test_a_failed_job_does_not_stop_the_others(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def run(words: list[str]) -> int:
        tried.append(words[0])
        return 1

    monkeypatch.setattr(study_module, "run_command", run)
    assert cli.main(command(settings)) == 0
    assert tried == ["pretrain"] * 6
    assert capsys.readouterr().out.count("failed: ") == 12


def test_the_plan_is_checked_before_anything_starts(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(settings | {"dry_run": "true"})) == 0
    assert "block parameters" in capsys.readouterr().out and not (tmp_path / "study").exists()
    assert cli.main(command(settings | {"task_options": '{"optim.lrr": "1"}'})) == 2
    assert "unknown key 'optim.lrr'" in capsys.readouterr().err
    assert cli.main(command(settings | {"shard": "3/2"})) == 2


def test_shards_cover_every_job_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in ("1/2", "2/2"):
        study = plan_study(build(StudyConfig, [], settings | {"shard": shard}))
        tried: list[list[str]] = []
        monkeypatch.setattr(study_module, "run_command", lambda words, tried=tried: tried.append(words) or 1)
        study_module.run_study(study)
        assert len(tried) == 3


def test_a_study_of_this_project_can_be_planned() -> None:
    project = Path(__file__).parent.parent.parent
    config = build(StudyConfig, [project / "configs" / "study" / "encoder-vs-decoder.yaml"], {})
    assert config.seeds == 3 and config.match == "parameters"
