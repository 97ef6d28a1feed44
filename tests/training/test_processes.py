"""Several processes are one: the same data, metrics and weights, whoever starts them and however they end."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline import cli
from pipeline.bundle import load_bundle
from pipeline.data.batch import Batch
from pipeline.data.store import Store
from pipeline.data.windows import Windows
from pipeline.training.module import Network
from pipeline.training.run import Run
from tests.training.jobs import arguments, last_step, rows, write_novels

torch.set_num_threads(1)

PROJECT = Path(__file__).parent.parent.parent
PATIENCE = 150
PADDED = ("flops", "tokens_computed")
"""These count padding, of which there is more or less in other micro-batches."""


@dataclass
class Command:
    """A command in a process group of its own, and what it prints."""

    words: Sequence[str]
    output: Path
    environment: dict[str, str]

    def start(self) -> "Command":
        with self.output.open("a") as written:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.words],
                cwd=PROJECT,
                env=self.environment,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def finish(self, timeout: float = PATIENCE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s: {self.printed}") from None
        finally:
            self.end()

    def end(self) -> None:
        if self.anyone_left:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    @property
    def printed(self) -> str:
        return self.output.read_text()

    @property
    def anyone_left(self) -> bool:
        """Whether a process of the group is there."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@dataclass
class Place:
    """Where the runs of these tests are, and the settings they share."""

    folder: Path
    novels: Path
    batch_size: int
    steps: int

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "WANDB"))}
        return kept | {"OMP_NUM_THREADS": "1"}

    def words(self, run: str, **more: Any) -> list[str]:
        settings: dict[str, Any] = {
            "family": "encoder-decoder",
            "model__dropout": 0.0,
            "tracking__samples_every": 0,
            "optim__epsilon": 1e-4,
            "optim__warmup_steps": 2,
            "data__batch_size": self.batch_size,
            "data__stores": self.folder / "stores",
            "trainer__max_steps": self.steps,
            "trainer__log_every": 1,
            "trainer__validate_every": 5,
            "trainer__validation_samples": 5,
            "trainer__save_every": 5,
        }
        return ["pipeline", *arguments(self.novels, self.folder / run, **settings | more)]

    def start(self, words: Sequence[str], name: str, **environment: str) -> Command:
        return Command(words, self.folder / f"{name}.txt", self.environment | environment).start()

    def alone(self, run: str, **more: Any) -> Path:
        """A run that was trained in this process."""
        assert cli.main(self.words(run, **more)[1:]) == 0
        return self.folder / run

    def finished(self, run: str, **more: Any) -> Path:
        """A run that was trained in processes of its own."""
        command = self.start(self.words(run, **more), run)
        assert command.finish() == 0, command.printed
        return self.folder / run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The batch size is such that the last batch of an epoch leaves the second of two processes without samples."""
    folder = tmp_path_factory.mktemp("processes")
    place = Place(folder, write_novels(folder / "novels", count=3, paragraphs=3), batch_size=1, steps=1)
    probe = Run(place.alone("probe"))
    count = len(Windows(Store.open(Path(probe.material["store"])).stream("train"), 32))
    place.batch_size = next(size for size in (7, 9, 11, 6, 8, 10) if 0 < count % size <= -(-size // 2))
    place.steps = 40
    assert place.steps > 2 * count / place.batch_size
    return place


@pytest.fixture(scope="module")
def alone(place: Place) -> Path:
    """What one process makes of it."""
    return place.alone("alone")


def assert_same(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """The same rows of metrics, each once, and the same weights, within rounding errors."""
    first, second = rows(one), rows(other)
    kinds = [(row["step"], "val/loss" in row) for row in second]
    assert len(kinds) == len(set(kinds)), "a row stands twice"
    assert kinds == [(row["step"], "val/loss" in row) for row in first]
    for expected, found in zip(first, second, strict=True):
        assert expected.keys() == found.keys()
        for key in expected.keys() - set(PADDED):
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), f"{key} at step {found['step']}"
    wanted, had = (load_bundle(run / "bundle").model.state_dict() for run in (one, other))
    assert wanted.keys() == had.keys()
    for name in wanted:
        torch.testing.assert_close(had[name], wanted[name], rtol=0, atol=tolerance)
    assert [path.name for path in other.rglob("metrics*")] == ["metrics.jsonl"]


def wait_for(condition: Callable[[], bool], command: Command) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert command.process.poll() is None, command.printed
        assert time.monotonic() < deadline, command.printed
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def test_two_processes_do_what_one_does(place: Place, alone: Path) -> None:
    """Several epochs, whose last batch leaves one process without samples; and 5 samples to validate on for two."""
    two = place.finished("two", trainer__devices=2)
    assert_same(alone, two)
    printed = (place.folder / "two.txt").read_text()
    assert printed.count("step 5: val/loss") == 1, "only one process should speak"
    assert printed.count(f"{two / 'bundle'}\n") == 1


def stopped_alone(place: Place, name: str) -> Path:
    """A run of one process that SIGTERM ended in its fourth step."""
    forward, calls = Network.forward, iter(range(10_000))

    def signalled(self: Network, batch: Batch, each: bool = False) -> Tensor:
        if self.training and not each and next(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return forward(self, batch, each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "forward", signalled)
        assert cli.main(place.words(name)[1:]) == 75
    assert last_step(place.folder / name) == 4
    return place.folder / name


def stopped_by_group(command: Command, run: Path, number: int) -> None:
    """Tell all processes of a command to stop as soon as a step is done, and see how they go."""
    before = last_step(run)
    wait_for(lambda: last_step(run) > before, command)
    os.killpg(command.process.pid, number)
    told = time.monotonic()
    code = command.process.wait(60)
    assert time.monotonic() - told < 20, "that took more than seconds"
    deadline = time.monotonic() + 5
    while command.anyone_left and time.monotonic() < deadline:
        time.sleep(0.05)
    left = command.anyone_left
    command.end()
    assert code == 75, command.printed
    assert not left, "a process was left behind"
    assert command.printed.count("stopped and saved; go on with") == 1 and "Traceback" not in command.printed
    checkpoints = sorted((run / "checkpoints").glob("*.json"))
    assert int(checkpoints[-1].stem[5:]) == last_step(run), "it should have saved the step it had reached"


def test_a_run_of_one_process_goes_on_with_two_and_stops_with_both(place: Place, alone: Path) -> None:
    """SIGTERM to the group of two processes saves, leaves with 75 within seconds, and leaves nobody behind.

    One process stops, two go on and stop, one finishes: as if it had been one all the time.
    """
    run = stopped_alone(place, "moved")
    two = place.start(["pipeline", "pretrain", "--resume", str(run), "--trainer.devices", "2"], "moved")
    stopped_by_group(two, run, signal.SIGTERM)
    assert two.printed.count("trainer.devices 1 → 2") == 1
    assert cli.main(["pretrain", "--resume", str(run), "--trainer.devices", "1"]) == 0
    assert_same(alone, run)


# --- Slow --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["encoder", "decoder", "recurrent"])
def test_two_processes_with_micro_batches_and_workers(family: str, place: Place) -> None:
    """A batch that divides evenly, in micro-batches that do not."""
    settings = {"family": family, "data__batch_size": 8, "data__micro_batch_size": 3, "data__loader_workers": 1}
    one = place.alone(f"{family}-one", **settings)
    two = place.finished(f"{family}-two", trainer__devices=2, **settings)
    assert_same(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_two_processes_saves_and_leaves_with_75(number: int, place: Place) -> None:
    """A run that would take very long."""
    name = f"signal-{number}"
    run = place.folder / name
    command = place.start(place.words(name, trainer__devices=2, trainer__max_steps=100_000), name)
    wait_for(lambda: last_step(run) >= 7, command)
    stopped_by_group(command, run, number)
    assert not (run / "bundle").exists() and 7 <= last_step(run) < 100_000


@pytest.mark.slow
def test_weights_in_parts_make_the_same_bundle(place: Place, alone: Path) -> None:
    """fsdp; five validation samples mean that one process has fewer batches of them than the other."""
    settings = {"trainer__strategy": "fsdp", "trainer__devices": 2}
    assert_same(alone, place.finished("parts", **settings))
    micro = {"data__micro_batch_size": 1, "trainer__max_steps": 3, "trainer__validation_samples": 3}
    one, two = place.alone("micro-alone", **micro), place.finished("micro-parts", **settings | micro)
    assert_same(one, two)


@pytest.mark.slow
def test_weights_in_parts_resume_as_whole_ones(place: Place, alone: Path) -> None:
    """A run of one process goes on with fsdp, whose checkpoint then goes on with one process."""
    run = stopped_alone(place, "cut")
    parts = ["--trainer.devices", "2", "--trainer.strategy", "fsdp"]
    second = place.start(["pipeline", "pretrain", "--resume", str(run), *parts], "cut")
    stopped_by_group(second, run, signal.SIGTERM)
    whole = ["--trainer.devices", "1", "--trainer.strategy", "auto"]
    assert cli.main(["pretrain", "--resume", str(run), *whole]) == 0
    assert_same(alone, run)


@pytest.mark.slow
def test_torchrun_with_two_nodes_does_what_one_process_does(place: Place, alone: Path) -> None:
    port = free_port()
    words = place.words("torchrun", trainer__devices=1, trainer__num_nodes=2)
    nodes: list[Command] = []
    for number in range(2):
        where = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        launch = ["torch.distributed.run", "--nnodes", "2", "--node_rank", str(number), "--nproc_per_node", "1", *where]
        nodes.append(place.start([*launch, "-m", *words], f"torchrun-{number}"))
    try:
        codes = [node.process.wait(PATIENCE) for node in nodes]
    finally:
        for node in nodes:
            node.end()
    assert codes == [0, 0], nodes[0].printed + nodes[1].printed
    assert_same(alone, place.folder / "torchrun")


@pytest.fixture
def two_by_two(place: Place) -> Iterator[list[Command]]:
    """Two nodes of two processes each, started by hand as Lightning's documentation says."""
    port = str(free_port())
    words = place.words("nodes", trainer__devices=2, trainer__num_nodes=2)
    nodes = [
        place.start(
            words, f"node-{node}", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=str(node), WORLD_SIZE="4"
        )
        for node in range(2)
    ]
    yield nodes
    for node in nodes:
        node.end()


@pytest.mark.slow
def test_two_nodes_of_two_processes_do_what_one_does(place: Place, alone: Path, two_by_two: list[Command]) -> None:
    """Every process has a number of its own: none reads what another reads."""
    codes = [node.process.wait(PATIENCE) for node in two_by_two]
    assert codes == [0, 0], two_by_two[0].printed + two_by_two[1].printed
    assert_same(alone, place.folder / "nodes")


@pytest.mark.slow
def test_a_dry_run_of_two_processes_ends(place: Place) -> None:
    command = place.start([*place.words("dry", trainer__devices=2), "--dry_run"], "dry")
    assert command.finish(60) == 0, command.printed
    assert not (place.folder / "dry").exists()
    assert command.printed.count("only the token store is kept") == 1


@pytest.mark.slow
def test_a_mistake_of_two_processes_is_one_line(place: Place) -> None:
    """Found before the second process is started, or by both of them."""
    command = place.start(place.words("wrong", trainer__devices=2, data__batch_size=5000), "wrong")
    assert command.finish(60) == 2, command.printed
    assert command.printed.count("error:") == 1 and "Traceback" not in command.printed
