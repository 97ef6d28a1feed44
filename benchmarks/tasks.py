"""What fine-tuning reaches on real tasks, with and without pretraining on novels, beside what is easy to beat.

    python -m benchmarks.tasks --data DATA --only sentiment retrieval --output benchmarks/results/tasks

DATA holds a folder of novels and one for each task, named as in benchmarks/tasks.yaml; without it the catalogue's sets
are taken. Every run is a `triptych` command of its own: it is printed, and what is finished is not done again, so that,
once the bundles of pretraining are there, two processes with `--only` and OMP_NUM_THREADS=1 can share the work; the
numbers of other tasks and runs stay in the JSON file. All runs of a family start from one bundle; those from scratch
have the same model and tokenizer. Scores are of validation rows.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import arguments_of, save, triptych, typed, written
from pipeline.configuration import build
from pipeline.data.rows import Rows, read_task
from pipeline.data.tasks import TASKS
from pipeline.files import read_json
from pipeline.terminal import note, print_table
from pipeline.training.config import FinetuneConfig

HEADER = ("task", "run", "metric", "mean", "deviation", "seeds", "next to nothing", "minutes a seed", "rows")


def main() -> None:
    parser = arguments_of("tasks", __doc__)
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--only", nargs="*", help="names of tasks")
    parser.add_argument("--runs", nargs="*", help="names of runs")
    parser.add_argument("--steps", type=int, help="so few of each run, to try it out")
    parser.add_argument("--precision", help="of every run: bf16-mixed is faster where the processor has bfloat16")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tasks"))
    arguments = parser.parse_args()
    text = arguments.settings.read_text().replace("DATA/", f"{arguments.data}/").replace("OUT/", f"{arguments.output}/")
    settings = yaml.safe_load(text)
    if not Path(arguments.data).is_dir():
        take_catalogue(settings, arguments.data, arguments.held_out)
    every: dict[str, Any] = {"trainer.precision": arguments.precision} if arguments.precision else {}
    if arguments.steps:
        every |= {"trainer.max_steps": arguments.steps, "trainer.validation_samples": 8}
    tasks = {name: task for name, task in settings["tasks"].items() if name in (arguments.only or [name])}
    for task in tasks.values():
        task["runs"] = {run: given for run, given in task["runs"].items() if run in (arguments.runs or [run])}
    starts = {run.get("start") for task in tasks.values() for run in task["runs"].values()} - {None}
    pretrain(settings["pretrain"], starts, every, arguments.output)
    rows = []
    for name, task in tasks.items():
        config = build(FinetuneConfig, [Path(file) for file in task["configs"]], as_typed(task["options"]))
        found = read_task(config.task, config.data, seed=1)
        rows_hash = found.fingerprint[:12]
        note(f"{name}: {config.data.train}, rows {rows_hash}")
        if config.task.name == "sentiment":
            rows.append((name, "TF-IDF, logistic regression", "accuracy", tfidf(found), 0.0, 1, "-", "-", rows_hash))
        for run, given in task["runs"].items():
            options = {key: value for key, value in given.items() if key != "start"}
            start = {"init_from": str(arguments.output / given["start"] / "bundle")} if "start" in given else {}
            options |= start or (settings["scratch"] if "model.family" in given else {})
            folder = arguments.output / f"{name}-{run}".replace(", ", "-").replace(" ", "-")
            rows.append((name, run, *finetune(task, task["options"] | options | every, folder), rows_hash))
        print_table(name, HEADER, [row for row in rows if row[0] == name])
    measured = [dict(zip(HEADER, row, strict=True)) for row in rows]
    save(arguments.json, measured + kept(arguments.json, measured))


def take_catalogue(settings: dict[str, Any], novels: str, held_out: list[str]) -> None:
    """Let every job read sets that anyone can fetch."""
    settings["pretrain"]["options"] |= {"data.corpus": [novels], "data.validation_books": held_out}
    for start in settings["pretrain"]["starts"].values():
        if "catalogue" in start:
            start["options"]["data.corpus"] = [start["catalogue"]]
    for task in settings["tasks"].values():
        task["options"] = {key: value for key, value in task["options"].items() if key != "data.validation"}
        task["options"]["data.train"] = task["catalogue"]


def pretrain(settings: dict[str, Any], names: set[str], every: dict[str, Any], output: Path) -> None:
    """A tokenizer, and the bundles that runs start from, those first that others go on from."""
    options = settings["options"] | every
    books = options["data.validation_books"]
    corpus = ["--corpus", written(options["data.corpus"]), "--validation_books", written(books)]
    if not (output / "tokenizer" / "meta.json").is_file():
        run("tokenizer", "train", *corpus, "--vocab_size", "8192", "--output", str(output / "tokenizer"))
    starts = settings["starts"]
    for name in reversed(starts):  # those that others go on from stand before them
        names |= {starts[name]["from"]} if name in names and "from" in starts[name] else set()
    for name in (name for name in starts if name in names):
        if not (output / name / "bundle" / "meta.json").is_file():
            configs, given = start_of(settings, name, output)
            run("pretrain", *configs, *typed(as_typed(given | every)), "--run_dir", str(output / name))


def start_of(settings: dict[str, Any], name: str, output: Path) -> tuple[list[str], dict[str, Any]]:
    """The configs and options of the pretraining that has this name."""
    start = settings["starts"][name]
    files = [f"configs/pretrain/{start['family']}.yaml", settings["config"]]
    options = settings["options"] | start.get("options", {})
    if "from" in start:
        options = {key: value for key, value in options.items() if key != "data.tokenizer"}  # it has its own
        options["init_from"] = str(output / start["from"] / "bundle")
    return [word for file in files for word in ("--config", file)], options


def finetune(task: dict[str, Any], options: dict[str, Any], folder: Path) -> tuple[object, ...]:
    """The metric that judges a task, over seeds, and what next to nothing scores."""
    runs = []
    for seed in range(1, task["seeds"] + 1):
        own = folder.with_name(f"{folder.name}-{seed}")
        if not (own / "bundle" / "meta.json").is_file():
            words = typed(as_typed(options | {"seed": seed, "tracking.mode": "disabled"}))
            configs = [word for file in task["configs"] for word in ("--config", file)]
            run("finetune", *configs, *words, "--run_dir", str(own))
        seconds = json.loads((own / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
        runs.append((read_json(own / "bundle" / "meta.json"), seconds))
    metas = [meta for meta, _ in runs]
    metric = TASKS[metas[0]["task"]["name"]].metric
    values = [meta["metrics"][f"val/{metric}"] for meta in metas]
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    minutes = statistics.mean(seconds for _, seconds in runs) / 60
    return metric, statistics.mean(values), deviation, len(values), metas[0]["baselines"][f"val/{metric}"], minutes


def kept(path: Path, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What earlier commands measured and this one did not."""
    measured = {(row["task"], row["run"]) for row in found}
    earlier = json.loads(path.read_text()) if path.is_file() else []
    return [row for row in earlier if (row["task"], row["run"]) not in measured]


def tfidf(rows: Rows) -> float:
    """The accuracy of counted words and pairs of words with a linear model."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(words, LogisticRegression(C=10, max_iter=1000))
    model.fit([row.source for row in rows.train], [row.label for row in rows.train])
    return float(model.score([row.source for row in rows.validation], [row.label for row in rows.validation]))


def as_typed(options: dict[str, Any]) -> dict[str, str]:
    return {key: written(value) for key, value in options.items()}


def run(*words: str) -> None:
    note(f"$ triptych {' '.join(words)}")
    triptych(*words)


if __name__ == "__main__":
    main()
