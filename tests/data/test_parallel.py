"""The same function in several processes: in order, with little in memory, and gone when it should be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.data.parallel import available_cores, parallel_map
from pipeline.errors import UserError


def late_when_even(number: int) -> int:
    time.sleep(0.02 * (number % 2 == 0))
    return number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise UserError("books/three.txt: bad")
    return number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def sleep_after_the_first(number: int) -> int:
    time.sleep(60 * (number > 0))
    return os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(parallel_map(late_when_even, range(20), workers)) == list(range(20))


def test_no_workers_mean_one_per_core() -> None:
    pids = set(parallel_map(process_id, range(4 * available_cores()), 0))
    assert (os.getpid() in pids) == (available_cores() == 1)


def process_id(_: int) -> int:
    return os.getpid()


def test_items_are_taken_only_as_they_are_needed() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for _ in range(40):
            taken += 1
            yield taken

    for done, _ in enumerate(parallel_map(late_when_even, items(), 2), 1):
        assert taken <= done + 3


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_worker_is_raised_here(workers: int) -> None:
    with pytest.raises(UserError, match=r"^books/three.txt: bad$"):
        list(parallel_map(fail_at_three, range(20), workers))


def test_a_worker_that_is_killed_is_one_line() -> None:
    with pytest.raises(UserError, match=r"a worker process was killed.*run again with --workers 1$"):
        list(parallel_map(die_at_three, range(20), 2))


def test_leaving_early_stops_workers_in_the_middle_of_a_job() -> None:
    began = time.monotonic()
    results = parallel_map(sleep_after_the_first, range(4), 2)
    worker = next(results)
    assert is_running(worker)
    results.close()
    assert time.monotonic() - began < 30
    assert not is_running(worker)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pipeline.data.parallel import parallel_map\n"
        "from tests.data.test_parallel import sleep_after_the_first\n"
        "if __name__ == '__main__':\n"
        "    for worker in parallel_map(sleep_after_the_first, range(4), 2):\n"
        "        print(worker, flush=True)\n"
    )
    project = Path(__file__).parents[2]
    command = [sys.executable, str(script)]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=project, env={**os.environ, "PYTHONPATH": "."},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )  # fmt: skip
    assert parent.stdout is not None
    assert is_running(int(parent.stdout.readline()))
    parent.send_signal(sent)
    parent.communicate(timeout=30)  # the workers have the same standard output: it ends with the last of them
    assert parent.returncode != 0


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
