"""What the harness works on: made-up novels and rows, and one small thing of each kind that the pipeline makes."""

import json
import os
import random
from pathlib import Path
from typing import Any

import yaml

from chaos.attempt import attempt
from tests.training.jobs import arguments, write_novels

FEW: dict[str, Any] = {"trainer__max_steps": 10, "trainer__save_every": 4, "trainer__validate_every": 4}


class Material:
    """Where everything is; nothing of it is ever changed, only copies."""

    def __init__(self, folder: Path) -> None:
        """Make what is not there."""
        self.novels = write_novels(folder / "novels")
        self.rows = write_rows(folder / "rows.jsonl", 48)
        self.run, self.tokenizer = folder / "pretrained", folder / "pretrained" / "tokenizer"
        self.classifier, self.exported = folder / "tuned" / "bundle", folder / "exported"
        os.environ |= {"TRIPTYCH_CACHE": str(folder / "cache"), "WANDB_MODE": "disabled"}
        for words in (
            arguments(self.novels, self.run, model__preset="gpt2", model__feed_forward=32, **FEW),
            finetune_words(self.rows, self.classifier.parent, init_from=self.run / "bundle", **FEW),
            ["export", str(self.run / "bundle"), str(self.exported)],
        ):
            if (outcome := attempt(words)).code:
                raise RuntimeError(f"triptych {' '.join(words)} fails: {outcome.wrong} {outcome.error}")
        self.store = Path(json.loads((self.run / "prepared.json").read_text())["store"])


def write_rows(path: Path, count: int) -> Path:
    """Film reviews with one telling word in each."""
    draw = random.Random(1)
    with path.open("w") as opened:
        for _ in range(count):
            label = draw.randrange(2)
            words = draw.choices("the a film plot was of with actor scene".split(), k=draw.randrange(3, 12))
            words.insert(draw.randrange(len(words)), draw.choice((("dull", "awful"), ("lovely", "bright"))[label]))
            opened.write(json.dumps({"text": " ".join(words), "label": label}) + "\n")
    return path


def finetune_words(rows: Path, run: Path, **more: Any) -> list[str]:
    """A small fine-tuning job; `__` in a name stands for a dot."""
    options = TASK | {"data.train": rows, "model.family": "decoder", "model.width": 32, "run_dir": run}
    options |= {name.replace("__", "."): value for name, value in more.items()}
    return ["finetune", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


TASK: dict[str, Any] = {
    "task.name": "sentiment",
    "data.new_tokenizer.vocab_size": 420,
    "data.sequence_length": 24,
    "data.batch_size": 8,
    "model.size": "tiny",
    "trainer.max_steps": 24,
    "trainer.log_every": 3,
    "trainer.validate_every": 8,
    "trainer.save_every": 5,
    "trainer.accelerator": "cpu",
    "tracking.mode": "disabled",
}


def study_words(rows: Path, folder: Path, seeds: int, steps: int) -> list[str]:
    """A study of two families on one task from scratch, from files that are written beside it."""
    task = TASK | {"data.train": str(rows), "trainer.max_steps": steps}
    del task["model.size"]
    file, study = folder.with_name("task.yaml"), folder.with_name("study.yaml")
    told = {"families": ["encoder", "decoder"], "size": "tiny", "seeds": seeds, "tasks": [str(file)]}
    file.write_text(yaml.safe_dump(nested(task)))
    study.write_text(yaml.safe_dump(told))
    return ["compare", f"--config={study}", f"--run_dir={folder}"]


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """Settings with dotted keys as sections; a section in the place of a value gives way to it."""
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place.get(section, {}), dict) else {}
        place[last] = value
    return tree
