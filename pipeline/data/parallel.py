"""The same function on many items, in several processes, with little in memory."""

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import TypeVar

from pipeline.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int = 0
) -> Generator[Result, None, None]:
    """Yield `function(item)` in the order of the items; 0 workers mean one per core, 1 stays in this process.

    Items are taken as workers become free, two per worker at most, so a stream of texts never piles up. The workers
    end with the generator or with this process, however that ends, and leave a job in the middle to do so.
    """
    workers = workers or available_cores()
    if workers == 1:
        yield from map(function, items)
        return
    try:
        with worker_pool(workers) as pool:
            waiting: deque[Future[Result]] = deque()
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) == 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process was killed, most likely for lack of memory; run again with --workers {workers // 2}"
        ) from error


def available_cores() -> int:
    """The cores this process may use, which on a shared machine can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    context = get_context("spawn")  # forking a process that has threads (Arrow, Rayon) can deadlock
    held_by_workers, held_here = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(held_by_workers,))
    with held_by_workers, executor as pool, held_here:  # closing our end first: no wait for results nobody wants
        yield pool


def start_worker(lifeline: Connection) -> None:
    """Prepare a new worker: one core each, and an end that follows the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    threading.Thread(target=exit_when_closed, args=(lifeline,), daemon=True).start()


def exit_when_closed(lifeline: Connection) -> None:
    """End this worker when the other end of the pipe is closed, by hand or by the parent's death."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


def exit_with_parent(_: int) -> None:
    """Let a loader's worker end with the process that reads from it; torch sees to that only where it forks workers."""
    when_parent_ends(lambda: os._exit(1))


def when_parent_ends(act: Callable[[], object]) -> None:
    """Do something when the process that started this one has ended, however it did."""

    def wait() -> None:
        if parent := parent_process():
            parent.join()
            act()

    threading.Thread(target=wait, daemon=True).start()
