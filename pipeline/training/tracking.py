"""Weights & Biases: runs, axes and artifacts of a job; but for this and server.py nothing talks to wandb.

Every start of a job writes one folder below RUN_DIR/wandb, online or offline; all folders of a run directory carry the
same run id, so that a resumed job goes on where it stopped. A folder with a `.synced` file is wholly at the server.
"""

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pipeline.files import read_json, write_json
from pipeline.terminal import note, warn
from pipeline.training import server
from pipeline.training.config import TrackingConfig

if TYPE_CHECKING:
    import wandb

AXES = ("tokens", "flops", "seconds", "trainer/step")
FINISH_SECONDS = 8
"""How long to upload what is left at the end of a job; `sync` uploads the rest."""
UPLOAD_SECONDS = 300
"""How long a resumed job may upload what an earlier part of it left; then it goes on offline."""


@dataclass(frozen=True)
class Input:
    """An artifact that a job was made from; `version` is one of its aliases, such as a fingerprint."""

    name: str
    kind: str
    version: str


def start(
    config: TrackingConfig,
    run_dir: Path,
    settings: dict[str, Any],
    facts: dict[str, Any],
    inputs: list[Input],
    enabled: bool = True,
) -> "Tracker":
    """Begin to record a job, or go on recording it; whatever W&B does, this returns a tracker.

    `facts`, the stage among them, are what runs are compared by.
    """
    mode = os.environ.get("WANDB_MODE", "auto") if config.mode == "auto" else config.mode
    if not enabled or mode == "disabled":
        return Tracker()
    run_dir = run_dir.resolve()
    try:
        from pipeline.bundle import git_commit  # here, since it brings torch, which `sync` does not need

        server.prepare(run_dir)
        record = open_record(run_dir, config, inputs)
        arguments = {key: record[key] for key in ("id", "project", "entity")} | {
            "group": config.group,
            "name": config.name or run_dir.name,
            "job_type": facts["stage"],
            "tags": config.tags,
            "config": settings | facts | config.labels | {"git_commit": git_commit()},
            "resume": "allow",
            "dir": run_dir,
        }
        lock = server.hold_lock(run_dir)
        return Tracker(open_run(arguments, mode), arguments, lock)
    except Exception as error:  # tracking never stops training
        warn(f"W&B: this run is not tracked ({server.one_line(error)})")
        return Tracker()


class Tracker:
    """A run at W&B, or none; no method raises, and none waits for the server but `finish`, for some seconds."""

    def __init__(
        self, run: "wandb.Run | None" = None, arguments: dict[str, Any] | None = None, lock: TextIO | None = None
    ) -> None:
        self.run = run
        self.arguments = arguments or {}
        self.lock = lock
        self.final: dict[str, Any] = {}
        self.unsent: list[Callable[[wandb.Run], None]] = []
        self.warned: set[str] = set()
        # Tables and artifacts ask the server before they return: a server that is away would hold up training.
        self.worker = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(1 if kind else 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row; W&B's own step only counts rows, since a resumed job repeats some and W&B drops steps it had."""
        with self.forgiving("metrics"):
            if self.run:
                self.run.log({**metrics, "trainer/step": step})

    def image(self, key: str, path: Path, step: int) -> None:
        """Log a picture."""
        with self.forgiving("an image"):
            if self.run:
                import wandb

                self.run.log({key: wandb.Image(str(path)), "trainer/step": step})

    def table(self, key: str, header: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table, such as samples of text."""

        def deliver(run: "wandb.Run") -> None:
            import wandb

            table = wandb.Table(columns=list(header), data=[list(row) for row in rows])
            run.log({key: table, "trainer/step": step})

        self.in_background(deliver)

    def artifact(
        self,
        name: str,
        kind: str,
        files: Path | Sequence[Path],
        metadata: dict[str, Any] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """Hand on a folder or files, which must not change any more; an `Input` finds them by name and alias."""

        def deliver(run: "wandb.Run") -> None:
            import wandb

            artifact = wandb.Artifact(name, kind, metadata=metadata)
            for path in [files] if isinstance(files, Path) else files:
                # What lies in the run directory stays there: a copy of every bundle would only fill the disk.
                policy: Any = "immutable" if path.resolve().is_relative_to(self.arguments["dir"]) else "mutable"
                add = artifact.add_dir if path.is_dir() else artifact.add_file
                add(str(path), policy=policy, skip_cache=True)
            logged = run.log_artifact(artifact, aliases=["latest", *aliases])
            if not run.offline:
                server.wait_for(logged)

        self.in_background(deliver)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set the numbers that stand for the whole run: flat keys such as best/… and final/…"""
        with self.forgiving("the summary"):
            self.final |= values
            if self.run:
                self.run.summary.update(dict(values))

    def finish(self, exit_code: int = 0) -> None:
        """End the run; what is not uploaded within seconds stays on disk, and one line says how to upload it."""
        if not self.run:
            return
        online, segment = not self.run.offline, Path(self.run.dir).parent
        self.worker.submit(self.offer_unsent, self.run)
        if online:  # now: it may have made some of them itself
            self.worker.submit(server.declare_inputs, self.arguments["dir"])
        self.worker.shutdown()
        complete = not self.unsent
        with self.forgiving("the end of the run"):
            try:
                self.run.finish(exit_code)
                if online:
                    server.synced_mark(segment).touch()
            except TimeoutError:
                complete = False
            if self.unsent:
                self.keep_unsent(exit_code)
            import wandb

            wandb.teardown()  # only then an offline run is wholly on disk
        if online and not complete:
            note(f"W&B: the end of the run is only on disk; to upload it: triptych sync {self.arguments['dir']}")
        self.run = None
        if self.lock:
            self.lock.close()

    def in_background(self, deliver: Callable[["wandb.Run"], None]) -> None:
        if self.run:
            self.worker.submit(self.attempt, self.run, deliver)

    def attempt(self, run: "wandb.Run", deliver: Callable[["wandb.Run"], None]) -> None:
        with self.forgiving("a table or artifact"):
            try:
                if not run.offline:
                    server.require_server()
                deliver(run)
            except Exception:
                if not run.offline:
                    self.unsent.append(deliver)
                raise

    def offer_unsent(self, run: "wandb.Run") -> None:
        unsent, self.unsent = self.unsent, []
        for deliver in unsent:
            self.attempt(run, deliver)

    def keep_unsent(self, exit_code: int) -> None:
        """Write what the server did not take as an offline part of the same run: online, wandb keeps no copy of it."""
        run = init(self.arguments, mode="offline")
        self.offer_unsent(run)
        run.summary.update(self.final)
        run.finish(exit_code)

    @contextmanager
    def forgiving(self, what: str) -> Iterator[None]:
        """Turn any failure of W&B into one warning for each kind of thing."""
        try:
            yield
        except Exception as error:
            if what not in self.warned:
                self.warned.add(what)
                warn(f"W&B: {what} could not be sent ({server.one_line(error)}); training goes on")


def open_run(arguments: dict[str, Any], mode: str) -> "wandb.Run":
    """Open the run online where that is wanted and works, else offline with a line that says why and how to upload."""
    reason = "as asked"
    if mode != "offline":
        try:
            server.require_key()
            server.require_server()
            if earlier := server.unsynced(arguments["dir"]):
                server.upload(earlier, timeout=UPLOAD_SECONDS)  # first, or its rows would come after those of this job
            return init(arguments, mode="online")
        except Exception as error:
            reason = server.one_line(error)
            server.prepare(arguments["dir"])
    note(f"W&B: offline ({reason}); to upload the run later: triptych sync {arguments['dir']}")
    return init(arguments, mode="offline")


def init(arguments: dict[str, Any], mode: Literal["online", "offline"]) -> "wandb.Run":
    import wandb

    settings = wandb.Settings(
        console="off",
        silent=True,
        init_timeout=2 * server.PATIENCE_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        x_transaction_log_flush_interval=0.5,  # what a killed process loses, in seconds
    )
    run = wandb.init(**arguments, mode=mode, settings=settings)
    for axis in AXES:
        run.define_metric(axis)
    for metrics in ("train/*", "val/*"):
        run.define_metric(metrics, step_metric="tokens")
    return run


def open_record(run_dir: Path, config: TrackingConfig, inputs: list[Input]) -> dict[str, Any]:
    """Read or make the file that keeps the run's id, and the artifacts it was made from until the server knows them."""
    path = server.record_path(run_dir)
    names: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "project": config.project, "entity": config.entity}
    record = read_json(path) if path.exists() else names | {"inputs": []}
    known = [(given["name"], given["kind"], given["version"]) for given in record["inputs"]]
    record["inputs"] += [asdict(given) | {"declared": False} for given in inputs if astuple(given) not in known]
    write_json(path, record)
    return record
