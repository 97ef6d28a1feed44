"""How long one waits for help, and for the first step on a prepared store, beside importing transformers' Trainer.

python -m benchmarks.startup --data NOVELS --rounds 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recipes import HELD_OUT, written
from pipeline.terminal import print_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="novels-gutenberg", help="a folder of novels, or a name from the catalogue")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/startup.json"), help="the numbers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options: dict[str, object] = {
            "data.corpus": [arguments.data], "data.validation_books": [*HELD_OUT], "data.stores": f"{scratch}/stores",
            "model.size": "tiny", "trainer.max_steps": 1, "trainer.validation_samples": 1, "tracking.mode": "disabled",
            "tracking.samples_every": 0,
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", written(value))]
        triptych, first = [sys.executable, "-m", "pipeline"], f"{scratch}/first"
        subprocess.run([*triptych, "pretrain", *words, "--run_dir", first], check=True, capture_output=True)
        words += ["--data.tokenizer", f"{first}/tokenizer"]
        seconds: dict[str, list[float]] = {}
        for turn in range(arguments.rounds):
            jobs = {
                "triptych --help": [*triptych, "--help"],
                "a first step and a bundle": [*triptych, "pretrain", *words, "--run_dir", f"{scratch}/{turn}"],
                "import transformers.Trainer": [sys.executable, "-c", "from transformers import Trainer"],
            }  # fmt: skip
            for name, command in jobs.items():
                began = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    rows = [(name, statistics.median(found), min(found), max(found)) for name, found in seconds.items()]
    print_table("Start-up", ("what", "seconds", "least", "most"), rows)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
