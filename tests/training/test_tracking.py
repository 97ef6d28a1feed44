"""Tracking against a W&B server of our own: what it gets, and that training goes on without it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserError
from pipeline.training import tracking
from pipeline.training.config import TrackingConfig
from pipeline.training.server import hold_lock, sync
from pipeline.training.tracking import Input, Tracker, start
from tests.training.wandb_server import Server, serving

KEY = "k" * 40


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody's key, settings or server; a fresh wandb for each test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_DATA_DIR", "WANDB_HTTP_TIMEOUT", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")  # so that what tracking sets here ends with the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and a key for it."""
    with serving() as running:
        monkeypatch.setenv("WANDB_BASE_URL", running.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield running


def begin(run_dir: Path, inputs: list[Input] | None = None, **config: Any) -> Tracker:
    return start(
        TrackingConfig(group="novels", tags=["test"], **config),
        run_dir,
        settings={"model": {"width": 128}, "seed": 1},
        facts={"stage": "pretrain", "family": "decoder", "size": "tiny"},
        inputs=inputs or [],
    )


def train(tracker: Tracker, first: int, last: int) -> None:
    for step in range(first, last + 1):
        tracker.log({"train/loss": 1 / step, "tokens": 64 * step, "flops": 1e9 * step, "seconds": step / 8}, step)


def hand_on(tracker: Tracker, run_dir: Path) -> None:
    """All that is not a row of numbers."""
    (run_dir / "bundle").mkdir(parents=True, exist_ok=True)
    (run_dir / "bundle" / "model.safetensors").write_bytes(b"weights")
    tracker.table("samples", ["prompt", "text"], [["It was", "a dark and stormy night"]], 4)
    tracker.artifact("bundle", "model", run_dir / "bundle", {"loss": 0.25}, ["abc123"])
    tracker.summary({"best/loss": 0.25})


def read_back(run_dir: Path) -> list[dict[str, Any]]:
    """The records of an offline run, by wandb's own reader."""
    import wandb

    wandb.teardown()  # without it the end of the file may be missing
    folder = next(run_dir.glob("wandb/offline-run-*"))
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_without_a_key_a_run_is_offline_and_holds_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "corpus.json"
    outside.write_text("{}")
    tracker = begin(tmp_path / "run")
    train(tracker, 1, 4)
    hand_on(tracker, tmp_path / "run")
    tracker.artifact("corpus", "corpus", [outside])
    tracker.finish()
    assert capsys.readouterr().err.count("\n") == 1  # how to upload it
    records = read_back(tmp_path / "run")
    config = next(record["run"] for record in records if record["type"] == "run")["config"]["update"]
    assert config["family"] == "decoder" and config["model"] == {"width": 128} and len(config["git_commit"]) == 40
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    numbers = [{key: row[key] for key in row if not key.startswith("_")} for row in rows if "train/loss" in row]
    assert numbers == [
        {"train/loss": 1 / n, "tokens": 64 * n, "flops": 1e9 * n, "seconds": n / 8, "trainer/step": n}
        for n in range(1, 5)
    ]
    assert sum(row.get("samples.nrows") == 1 for row in rows) == 1
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    assert {"bundle", "corpus"} < {artifact["name"] for artifact in artifacts}
    places = [content["local_path"] for artifact in artifacts for content in artifact["manifest"]["contents"]]
    assert all(Path(place).is_relative_to(tmp_path / "run") for place in places)
    assert any(record["type"] == "summary" and "best/loss" in record["summary"]["update"] for record in records)


def test_online_the_server_gets_one_run_with_everything(tmp_path: Path, server: Server) -> None:
    corpus = tmp_path / "corpus.json"
    corpus.write_text("{}")
    maker = begin(tmp_path / "maker")
    maker.artifact("corpus", "corpus", [corpus], aliases=["f00d"])
    maker.finish()
    tracker = begin(tmp_path / "run", [Input("corpus", "corpus", "f00d")])
    train(tracker, 1, 4)
    hand_on(tracker, tmp_path / "run")
    tracker.finish(exit_code=3)
    _, run = server.runs.values()
    assert run.exit_code == 3 and run.used == ["corpus"]
    expected = {"displayName": "run", "jobType": "pretrain", "groupName": "novels", "tags": ["test"]}
    assert expected.items() <= run.fields.items() and run.fields["project"] == "triptych"
    assert run.config["model"]["value"] == {"width": 128} and run.config["family"]["value"] == "decoder"
    assert run.axes == {"train/*": "tokens", "val/*": "tokens"}
    assert [row["train/loss"] for row in run.rows if "train/loss" in row] == [1 / step for step in range(1, 5)]
    assert sum("samples" in row for row in run.rows) == 1
    assert run.summary["best/loss"] == 0.25
    bundle = next(artifact for artifact in server.artifacts if artifact.collection == "bundle")
    assert bundle.committed and bundle.made_by == run.name and bundle.metadata == {"loss": 0.25}
    assert {"abc123", "latest"} == set(bundle.aliases) and bundle.kind == "model"
    assert server.uploads[f"/{bundle.id}/model.safetensors"] == b"weights"
    server.requests.clear()
    sync(tmp_path)
    assert server.requests == []


def test_a_picture_reaches_the_server(tmp_path: Path, server: Server) -> None:
    pytest.importorskip("PIL.Image").new("L", (3, 2)).save(tmp_path / "map.png")
    tracker = begin(tmp_path / "run")
    tracker.image("attention", tmp_path / "map.png", 4)
    tracker.finish()
    (row,) = next(iter(server.runs.values())).rows
    assert row["attention"]["width"] == 3 and row["trainer/step"] == 4
    assert (tmp_path / "map.png").read_bytes() in server.uploads.values()


@pytest.mark.parametrize("broken", ["away", "answers errors"])
def test_a_server_that_is_not_there_makes_the_run_offline(
    broken: str, tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    if broken == "away":
        server.die()
    server.failing = True
    began = time.monotonic()
    tracker = begin(tmp_path / "run", mode="online")
    train(tracker, 1, 2)
    tracker.finish()
    assert time.monotonic() - began < 10
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "triptych sync" in said
    assert sum(record["type"] == "history" for record in read_back(tmp_path / "run")) == 2


def test_a_server_that_refuses_the_run_makes_it_offline(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refused.add("UpsertBucket")
    tracker = begin(tmp_path / "run")
    train(tracker, 1, 2)
    tracker.finish()
    assert "refused" in capsys.readouterr().err
    server.refused.clear()
    sync(tmp_path / "run")
    (run,) = server.runs.values()
    assert len(run.rows) == 2 and run.exit_code == 0


def test_training_goes_on_when_the_server_dies_and_sync_uploads_the_rest(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_refusal() -> None:
        time.sleep(1)
        raise UserError("no answer")

    monkeypatch.setattr(tracking, "FINISH_SECONDS", 3)
    tracker = begin(tmp_path / "run")
    train(tracker, 1, 2)
    server.die()
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.training.server.require_server", slow_refusal)
        began = time.monotonic()
        train(tracker, 3, 4)
        hand_on(tracker, tmp_path / "run")
        assert time.monotonic() - began < 1
        tracker.finish()
        assert time.monotonic() - began < 25
    assert not server.artifacts
    server.revive()
    sync(tmp_path / "run")
    (run,) = server.runs.values()
    assert {row["trainer/step"] for row in run.rows if "train/loss" in row} == {1, 2, 3, 4}
    assert any("samples" in row for row in run.rows)
    assert run.summary["best/loss"] == 0.25
    assert {"bundle", f"run-{run.name}-samples"} == {artifact.collection for artifact in server.artifacts}
    rows = len(run.rows)
    sync(tmp_path / "run")
    assert len(run.rows) == rows


@pytest.mark.parametrize("mode", ["online", pytest.param("offline", marks=pytest.mark.slow)])
def test_a_resumed_job_goes_on_in_the_same_run(
    mode: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, resumed, resumed: what the first part did not upload is uploaded first, and no step goes backwards."""
    program = f"""
import time
from pathlib import Path
from tests.training.test_tracking import begin, train
tracker = begin(Path({str(tmp_path / "run")!r}), mode={mode!r})
train(tracker, 1, 4)
time.sleep(1.5)
print("logged", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "logged\n"
        process.send_signal(signal.SIGKILL)
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "netrc").write_text(f"machine 127.0.0.1:{server.port} login user password {KEY}\n")
    monkeypatch.delenv("WANDB_API_KEY")
    for first, last in ((3, 6), (7, 8)):
        tracker = begin(tmp_path / "run")
        train(tracker, first, last)
        tracker.finish()
    (run,) = server.runs.values()
    # Rows that were uploaded before the kill come again under their own step, by which W&B knows them.
    steps = {row["_step"]: row["trainer/step"] for row in run.rows}
    assert sorted(steps.items()) == list(enumerate([1, 2, 3, 4, 3, 4, 5, 6, 7, 8]))


def test_sync_adds_the_inputs_that_were_recorded_offline(tmp_path: Path, server: Server) -> None:
    """Two runs of a study; the one that needs the other's bundle comes first in the folder."""
    tuned = begin(tmp_path / "1-finetune", [Input("bundle", "model", "abc123")], mode="offline")
    tuned.finish()
    pretrained = begin(tmp_path / "2-pretrain", mode="offline")
    hand_on(pretrained, tmp_path / "2-pretrain")
    pretrained.finish()
    with hold_lock(tmp_path / "2-pretrain"):  # it still runs
        sync(tmp_path)
    assert [run.used for run in server.runs.values()] == [[]]
    sync(tmp_path)
    sync(tmp_path)
    assert [run.used for run in server.runs.values()] == [["bundle"], []]


def test_what_sync_cannot_do_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no tracked run"):
        sync(tmp_path)
    begin(tmp_path / "run").finish()
    with pytest.raises(UserError, match="no W&B key"):
        sync(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(UserError, match="does not answer"):
        sync(tmp_path)


def test_disabled_and_other_ranks_write_nothing_and_do_not_import_wandb(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from pipeline.training.tracking import start
from pipeline.training.config import TrackingConfig
run_dir = Path({str(tmp_path)!r})
common = dict(settings={{}}, facts={{}}, inputs=[])
for tracker in (
    start(TrackingConfig(mode="disabled"), run_dir, **common),
    start(TrackingConfig(mode="offline"), run_dir, **common, enabled=False),
):
    tracker.log({{"train/loss": 1.0}}, 1)
    tracker.table("samples", ["text"], [["x"]], 1)
    tracker.image("attention", run_dir / "none.png", 1)
    tracker.artifact("bundle", "model", run_dir)
    tracker.summary({{"best/loss": 1.0}})
    tracker.finish()
assert "wandb" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list(tmp_path.iterdir()) == []


def test_no_failure_reaches_training_and_each_kind_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = begin(tmp_path / "run", mode="offline")
    for step in (1, 2):
        tracker.image("attention", tmp_path / "none.png", step)
        tracker.artifact("no such name: /", "model", tmp_path / "none")
    tracker.finish()
    tracker.log({"train/loss": 1.0}, 3)
    assert capsys.readouterr().err.count("warning") == 2
