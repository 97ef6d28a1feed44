"""What fine-tuning reaches on real tasks, with and without pretraining on novels, beside what is easy to beat.

    python -m benchmarks.tasks --data DATA --only sentiment retrieval --output benchmarks/results/tasks

DATA holds a folder of novels and one for each task; their names are in benchmarks/tasks.yaml. Every run is a `triptych`
command of its own: it is printed, and what is finished is not done again. All runs of a family start from one bundle;
those from scratch have the same model and tokenizer. Scores are of the held-out part that each set brings.
"""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import arguments_of, save, triptych, typed, written
from pipeline.data.tasks import TASKS
from pipeline.files import read_json
from pipeline.terminal import note, print_table

HEADER = ("task", "run", "metric", "mean", "deviation", "seeds", "next to nothing", "minutes a seed")
FAMILIES = ("encoder", "decoder", "encoder-decoder")


def main() -> None:
    parser = arguments_of("tasks", __doc__)
    parser.add_argument("--settings", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--only", nargs="*", help="names of tasks")
    parser.add_argument("--steps", type=int, help="so few of each run, to try it out")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tasks"))
    arguments = parser.parse_args()
    text = arguments.settings.read_text().replace("DATA/", f"{arguments.data}/").replace("OUT/", f"{arguments.output}/")
    settings = yaml.safe_load(text)
    few = {"trainer.max_steps": arguments.steps, "trainer.validation_samples": 8} if arguments.steps else {}
    tasks = {name: task for name, task in settings["tasks"].items() if name in (arguments.only or [name])}
    starts = {run.get("start") for task in tasks.values() for run in task["runs"].values()} - {None}
    pretrain(settings["pretrain"], starts, few, arguments.output)
    rows = []
    for name, task in tasks.items():
        note(f"{name}: training rows {content_hash(Path(task['options']['data.train']))}")
        if task.get("tfidf"):
            rows.append((name, "TF-IDF, logistic regression", "accuracy", tfidf(task["options"]), 0.0, 1, "-", "-"))
        for run, given in task["runs"].items():
            options = {key: value for key, value in given.items() if key != "start"}
            start = {"init_from": str(arguments.output / given["start"] / "bundle")} if "start" in given else {}
            options |= start or (settings["scratch"] if "model.family" in given else {})
            folder = arguments.output / f"{name}-{run}".replace(", ", "-").replace(" ", "-")
            rows.append((name, run, *finetune(task, task["options"] | options | few, folder)))
        print_table(name, HEADER, [row for row in rows if row[0] == name])
    save(arguments.json, [dict(zip(HEADER, row, strict=True)) for row in rows])


def pretrain(settings: dict[str, Any], families: set[str], few: dict[str, Any], output: Path) -> None:
    """A tokenizer and a bundle of each family that a run starts from."""
    options = settings["options"] | few
    books = yaml.safe_load(Path(settings["config"]).read_text())["data"]["validation_books"]
    corpus = ["--corpus", written(options["data.corpus"]), "--validation_books", json.dumps(books)]
    if not (output / "tokenizer" / "meta.json").is_file():
        run("tokenizer", "train", *corpus, "--vocab_size", "8192", "--output", str(output / "tokenizer"))
    for family in sorted(families, key=FAMILIES.index):
        if not (output / family / "bundle" / "meta.json").is_file():
            configs = ["--config", f"configs/pretrain/{family}.yaml", "--config", settings["config"]]
            run("pretrain", *configs, *typed(as_typed(options)), "--run_dir", str(output / family))


def finetune(task: dict[str, Any], options: dict[str, Any], folder: Path) -> tuple[object, ...]:
    """The metric that judges a task, over seeds, and what next to nothing scores."""
    runs = []
    for seed in range(1, task["seeds"] + 1):
        own = folder.with_name(f"{folder.name}-{seed}")
        if not (own / "bundle" / "meta.json").is_file():
            words = typed(as_typed(options | {"seed": seed, "tracking.mode": "disabled"}))
            run("finetune", "--config", task["config"], *words, "--run_dir", str(own))
        seconds = json.loads((own / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
        runs.append((read_json(own / "bundle" / "meta.json"), seconds))
    metas = [meta for meta, _ in runs]
    metric = TASKS[metas[0]["task"]["name"]].metric
    values = [meta["metrics"][f"val/{metric}"] for meta in metas]
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    minutes = statistics.mean(seconds for _, seconds in runs) / 60
    return metric, statistics.mean(values), deviation, len(values), metas[0]["baselines"][f"val/{metric}"], minutes


def tfidf(options: dict[str, Any]) -> float:
    """The accuracy of counted words and pairs of words with a linear model."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    files = (options["data.train"], options["data.validation"])
    train, dev = ([json.loads(line) for line in Path(file).read_text().splitlines()] for file in files)
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10, max_iter=1000)
    )
    model.fit([row["text"] for row in train], [row["label"] for row in train])
    return float(model.score([row["text"] for row in dev], [row["label"] for row in dev]))


def as_typed(options: dict[str, Any]) -> dict[str, str]:
    return {key: written(value) for key, value in options.items()}


def run(*words: str) -> None:
    note(f"$ triptych {' '.join(words)}")
    triptych(*words)


def content_hash(path: Path) -> str:
    """Twelve figures by which a set of rows is known."""
    files = sorted(path.glob("*.*")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


if __name__ == "__main__":
    main()
