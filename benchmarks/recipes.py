"""What each part of a recipe is worth: variants of one pretraining job, several seeds, on held-out novels.

    python -m benchmarks.recipes --data NOVELS --seeds 3 --output benchmarks/results/recipes

Every run is a `triptych pretrain` of its own, two at a time with a thread each, all on the same tokenizer, windows and
order. What is finished is not done again. The measure is bits per byte, for families that have none their validation
loss; at equal steps neither depends on what else the machine does.
"""

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from benchmarks.harness import arguments_of, save, triptych, typed, written
from pipeline.files import read_json
from pipeline.terminal import note, print_table


def main() -> None:
    parser = arguments_of("recipes", __doc__)
    parser.add_argument("--variants", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/recipes"))
    arguments = parser.parse_args()
    settings = yaml.safe_load(arguments.variants.read_text())
    variants = {name: given for name, given in settings["variants"].items() if name in (arguments.only or [name])}
    tokenizer = arguments.output / "tokenizer"
    held_out = json.dumps(arguments.held_out)
    corpus = ["--corpus", arguments.data, "--validation_books", held_out]
    if not (tokenizer / "meta.json").is_file():
        triptych("tokenizer", "train", *corpus, "--vocab_size", "8192", "--output", str(tokenizer))
    common = settings["common"] | {"data.corpus": arguments.data, "data.validation_books": held_out}
    common |= {"data.tokenizer": str(tokenizer), "data.stores": str(arguments.output / "stores")}
    runs = {
        (name, seed): common | given | {"seed": seed, "run_dir": str(arguments.output / f"{name}-{seed}")}
        for seed in range(1, arguments.seeds + 1)
        for name, given in variants.items()
    }
    triptych("prepare", *corpus, "--tokenizer", str(tokenizer), "--output", common["data.stores"])
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = dict(zip(runs, pool.map(pretrain, runs.values()), strict=True))
    rows: list[tuple[str, str, float, float, int]] = []
    for name in variants:
        reached = [found[name, seed] for seed in range(1, arguments.seeds + 1)]
        measure = "val/bits_per_byte" if "val/bits_per_byte" in reached[0] else "val/loss"
        values = [metrics[measure] for metrics in reached]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append((name, measure, statistics.mean(values), deviation, len(values)))
    rows.sort(key=lambda row: row[1:3])
    print_table("at equal steps", ("recipe", "measure", "mean", "deviation", "seeds"), rows)
    save(arguments.json, rows)


def pretrain(options: dict[str, object]) -> dict[str, float]:
    """The metrics of a run, done now or before."""
    meta = Path(str(options["run_dir"])) / "bundle" / "meta.json"
    if not meta.is_file():
        note(f"{meta.parent.parent.name} begins")
        triptych("pretrain", *typed({key: written(value) for key, value in options.items()}), OMP_NUM_THREADS="1")
    return dict(read_json(meta)["metrics"])


if __name__ == "__main__":
    main()
