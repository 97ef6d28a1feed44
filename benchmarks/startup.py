"""How long one waits for help, and for the first step on a prepared store, beside importing transformers' Trainer.

python -m benchmarks.startup --data NOVELS --rounds 5
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import arguments_of, save, small_job, triptych, typed
from pipeline.terminal import print_table


def main() -> None:
    parser = arguments_of("startup", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options = small_job(arguments, Path(scratch), trainer__max_steps=1, trainer__validation_samples=1)
        words = typed(options | {"model.size": "tiny"})
        command, first = [sys.executable, "-m", "pipeline"], f"{scratch}/first"
        triptych("pretrain", *words, "--run_dir", first)
        words += ["--data.tokenizer", f"{first}/tokenizer"]
        seconds: dict[str, list[float]] = {}
        for turn in range(arguments.rounds):
            jobs = {
                "triptych --help": [*command, "--help"],
                "a first step and a bundle": [*command, "pretrain", *words, "--run_dir", f"{scratch}/{turn}"],
                "import transformers.Trainer": [sys.executable, "-c", "from transformers import Trainer"],
            }  # fmt: skip
            for name, job in jobs.items():
                began = time.perf_counter()
                subprocess.run(job, check=True, capture_output=True)
                seconds.setdefault(name, []).append(time.perf_counter() - began)
    rows = [(name, statistics.median(found), min(found), max(found)) for name, found in seconds.items()]
    print_table("Start-up", ("what", "seconds", "least", "most"), rows)
    save(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
