"""Several seeds of one fine-tuning job: a process and a run each, then the mean and the deviation of their scores."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pipeline.configuration import to_yaml
from pipeline.errors import Stopped, UserError
from pipeline.evaluation.process import run_command
from pipeline.files import read_json, write_json
from pipeline.terminal import note, print_table
from pipeline.training.config import FinetuneConfig
from pipeline.training.run import Run, default_folder, rank

STOPPED = (75, -2, -15)


def finetune_seeds(config: FinetuneConfig) -> list[Path]:
    """Do one run after the other and return the bundles; one that was stopped goes on, a finished one is left alone."""
    single = replace(config, seeds=1)
    base = Path(config.run_dir or default_folder(single, f"finetune-{config.task.name}"))
    single = replace(single, tracking=replace(config.tracking, group=config.tracking.group or base.name))
    seeds = range(config.seed, config.seed + config.seeds)
    runs = {seed: Run(base.with_name(f"{base.name}-seed{seed}")) for seed in seeds}
    for seed, run in runs.items():
        with TemporaryDirectory() as folder:
            file = Path(folder) / "config.yaml"
            file.write_text(to_yaml(replace(single, seed=seed, run_dir=str(run.path))), encoding="utf-8")
            code = run_command(["finetune", "--config", str(file)])
        unfinished = rank() == 0 and not run.finished
        if code in STOPPED or (code == 0 and unfinished):  # 0: the cluster starts this command again
            note("stopped and saved; the same command goes on")
            raise Stopped(requeued=code == 0)
        if code != 0:
            raise UserError(f"{run.path}: ended with exit code {code}; mend what it says above, then run this again")
    if rank() != 0:
        return []
    report(base, runs)
    return [run.bundle for run in runs.values()]


def report(base: Path, runs: dict[int, Run]) -> None:
    """Print and write the mean and the deviation (n - 1) of every metric over the seeds."""
    found = {seed: read_json(run.bundle / "meta.json")["metrics"] for seed, run in runs.items()}
    values = {key: [metrics[key] for metrics in found.values()] for key in next(iter(found.values()))}
    rows = [(key, float(np.mean(each)), float(np.std(each, ddof=1)), *each) for key, each in values.items()]
    header = ("metric", "mean", "± deviation", *(f"seed {seed}" for seed in found))
    print_table(f"{base}, {len(runs)} seeds", header, rows)
    written = {key: {"mean": mean, "deviation": deviation, "seeds": each} for key, mean, deviation, *each in rows}
    write_json(base.with_name(f"{base.name}-seeds.json"), written)
