"""What is asked of the W&B server outside of a running job: whether it is there, uploads, lineage, and reports."""

import fcntl
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.errors import UserError
from pipeline.files import read_json, write_json
from pipeline.terminal import note

if TYPE_CHECKING:
    import wandb

REPORT = "wandb-report.json"
"""What a study saves of its report."""
PATIENCE_SECONDS = 5
"""How long to wait for an answer before the server counts as away."""


def sync(folder: Path) -> None:
    """Upload every run below a folder that is not wholly at W&B, then add the artifacts that runs were made from."""
    run_dirs = [record.parent.parent for record in sorted(folder.rglob("wandb/run.json"))]
    if not run_dirs:
        raise UserError(f"{folder}: no tracked run here or below; give a run or study directory")
    prepare(run_dirs[0].resolve())
    require_key()
    require_server()
    finished = [run_dir for run_dir in run_dirs if not running(run_dir)]
    for run_dir in finished:
        if segments := unsynced(run_dir):
            upload(segments)
            note(f"W&B: {run_dir} is uploaded")
    for run_dir in finished:  # after all uploads: one run's input is another's artifact
        declare_inputs(run_dir)
    for specification in sorted(folder.glob(f"**/{REPORT}")):
        publish(specification)


def publish_if_online(folder: Path) -> None:
    """Publish the report of a study whose runs are all at the server; else say how to do it later."""
    run_dirs = [record.parent.parent for record in folder.rglob("wandb/run.json")]
    if run_dirs and not any(unsynced(run_dir) for run_dir in run_dirs):
        prepare(run_dirs[0].resolve())
        publish(folder / REPORT)
    elif run_dirs:
        note(f"W&B: to upload the runs and publish the report: triptych sync {folder}")


def publish(path: Path) -> None:
    """Make the report of a study at W&B from what the study saved, or bring it up to date."""
    try:
        from wandb_workspaces.reports.v2 import interface as reports
    except ImportError:
        note(f"W&B: the report of {path.parent} needs `pip install wandb-workspaces`; then sync again")
        return
    import wandb

    told = read_json(path)
    try:
        entity = told["entity"] or str(wandb.Api().default_entity)
        blocks = [make_block(reports, block, entity, told["project"]) for block in told["blocks"]]
        report = reports.Report(told["project"], entity, told["title"], told["description"], blocks, width="fluid")
        report.id = told.get("id", "")
        report.save()
        url = report.url.replace("?", "")  # of the title, which is only there to be read
        write_json(path, told | {"id": report.id, "url": url})
        note(f"W&B: the report is at {url}")
    except Exception as error:
        note(f"W&B: the report of {path.parent} is not published ({one_line(error)}); sync again")


def make_block(reports: Any, told: dict[str, Any], entity: str, project: str) -> Any:
    """A block of a report from its plain form: words, or panels over some runs."""
    if told["block"] != "PanelGrid":
        return {"H2": reports.H2, "MarkdownBlock": reports.MarkdownBlock}[told["block"]](told["text"])
    runs = reports.Runset(entity=entity, project=project, filters=told["filters"])
    kinds = (reports.LinePlot, reports.BarPlot, reports.ScatterPlot, reports.WeavePanelSummaryTable)
    made = {kind.__name__: kind for kind in kinds}
    panels = [
        made[panel["panel"]](**{key: value for key, value in panel.items() if key != "panel"})
        for panel in told["panels"]
    ]
    return reports.PanelGrid(runsets=[runs], panels=panels)


def declare_inputs(run_dir: Path) -> None:
    """Tell the server what the run was made from; what it does not have yet stays for the next `sync`."""
    import wandb

    record = read_json(record_path(run_dir))
    for given in record["inputs"]:
        if given["declared"]:
            continue
        name = server_path(record, f"{given['name']}:{given['version']}")
        try:
            api = wandb.Api()
            api.run(server_path(record, record["id"])).use_artifact(api.artifact(name, type=given["kind"]))
            given["declared"] = True
        except Exception as error:
            note(f"W&B: {name} is not an input of {run_dir} yet ({one_line(error)})")
    write_json(record_path(run_dir), record)


def require_key() -> None:
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError("no W&B key: set WANDB_API_KEY or run `wandb login`")


def require_server() -> None:
    import wandb

    url = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(f"{url}/graphql", timeout=PATIENCE_SECONDS).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise UserError(f"the W&B server {url} answers with error {error.code}: is it in order?") from error
    except OSError as error:
        raise UserError(f"the W&B server {url} does not answer: is the network there?") from error


def wait_for(artifact: "wandb.Artifact") -> None:
    """Wait until the server has an artifact, however long that takes while the server is there."""
    from wandb.sdk.artifacts.exceptions import WaitTimeoutError

    while True:
        try:
            artifact.wait(timeout=PATIENCE_SECONDS)
            return
        except WaitTimeoutError:
            require_server()


def unsynced(run_dir: Path) -> list[Path]:
    """The parts of a run that are not wholly at the server, oldest first."""
    parts = [log.parent for log in run_dir.glob("wandb/*run-*/*.wandb")]
    left = [part for part in parts if not synced_mark(part).exists()]
    return sorted(left, key=lambda part: part.name.removeprefix("offline-"))


def synced_mark(segment: Path) -> Path:
    """The file by which `wandb sync` knows that a part is uploaded."""
    return segment / f"run-{segment.name.rpartition('-')[2]}.wandb.synced"


def upload(segments: list[Path], timeout: float | None = None) -> None:
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", *map(str, segments)]
    environment = os.environ | {"WANDB_MODE": "online"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{segments[0]}: the upload takes too long") from error
    if not all(synced_mark(segment).exists() for segment in segments):
        raise UserError(f"{segments[0]}: not uploaded ({one_line(done.stderr or done.stdout)})")


def record_path(run_dir: Path) -> Path:
    return run_dir / "wandb" / "run.json"


def server_path(record: dict[str, Any], name: str) -> str:
    return "/".join(part for part in (record["entity"], record["project"], name) if part)


def hold_lock(run_dir: Path) -> TextIO:
    """Keep others from uploading a run that still goes on; the lock ends with the process, however that ends."""
    lock = (run_dir / "wandb" / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def running(run_dir: Path) -> bool:
    try:
        hold_lock(run_dir).close()
    except BlockingIOError:
        note(f"W&B: {run_dir} still runs; sync it when it has ended")
        return True
    return False


def one_line(error: object) -> str:
    """The last line that an error says."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def prepare(run_dir: Path) -> None:
    """Import wandb with files in the run directory, short waits and nothing said: what people read is our own lines."""
    os.environ["WANDB_DATA_DIR"] = str(run_dir / "wandb" / "staged")
    os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(PATIENCE_SECONDS))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    wandb.teardown()  # what a failed start or job left in this process, or the run's id counts as in use
    wandb.setup(settings=wandb.Settings(silent=True, mode="online"))
