"""The recipes for real use: every one is read and built, and the numbers at its head are those of its settings."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from pipeline.bundle import make_model
from pipeline.configuration import build
from pipeline.data import catalogue
from pipeline.data.corpus import scan
from pipeline.data.tasks import TASKS
from pipeline.evaluation.matching import lengths
from pipeline.model.config import Architecture, resolve
from pipeline.model.cost import activation_bytes, count_flops, count_parameters
from pipeline.training.config import FinetuneConfig, PretrainConfig, TrainerConfig
from pipeline.training.job import in_time
from tests.novels import novel

RECIPES = Path(__file__).parent.parent / "configs" / "recipes"
PRETRAIN, FINETUNE = (sorted((RECIPES / stage).glob("*.yaml")) for stage in ("pretrain", "finetune"))
PEAK, USED = 312e12, 0.4  # of an A100 in bfloat16, and the share of it that a good run reaches
MEMORY = 40e9
LIBRARIES = 3e9  # what CUDA, NCCL and the allocator take on top
STATE = 16  # bytes of a weight, its gradient and two moments


@dataclass(frozen=True)
class Work:
    """What a recipe does, from its settings alone."""

    model: Architecture
    vocab_size: int
    trainer: TrainerConfig
    tokens: float
    sequences: float
    """Of the whole run."""
    at_once: float
    """Sequences that a device computes at a time."""
    source: int
    target: int
    predicted: int
    most: str = ""
    """Said before a number that is a bound, since rows differ in length."""

    @property
    def parameters(self) -> int:
        return count_parameters(self.model, self.vocab_size).total

    @property
    def flops(self) -> float:
        one = count_flops(self.model, self.vocab_size, self.source, self.target, self.predicted)
        return self.sequences * one.training

    @property
    def memory(self) -> float:
        """Of one device; every number of the activations taken for 4 bytes, though some have 2."""
        state = STATE * self.parameters / (self.trainer.processes if self.trainer.strategy == "fsdp" else 1)
        return state + self.at_once * activation_bytes(self.model, self.source, self.target)

    def row(self, path: Path) -> str:
        """The same in the table of docs/recipes.md."""
        cells = [
            f"[{path.stem}](../{path.relative_to(RECIPES.parent.parent).as_posix()})",
            f"{self.parameters / 1e6:,.1f} million",
            f"{self.tokens / 1e6:,.0f} million",
            f"{self.flops:.1e}",
            f"{self.memory / 1e9:.0f} GB",
            f"{self.trainer.processes} × A100 40 GB",
        ]
        return "| " + " | ".join(cells) + " |\n"

    @property
    def head(self) -> str:
        """What a recipe says of itself."""
        trainer = self.trainer
        time = in_time(self.flops / (trainer.processes * PEAK * USED))
        how = f", {trainer.strategy.upper()}" if trainer.processes > 1 else ""
        return "\n".join(
            [
                f"#   parameters  {self.parameters / 1e6:,.1f} million",
                f"#   tokens      {self.most}{self.tokens / 1e6:,.0f} million in {trainer.max_steps:,} steps",
                f"#   FLOPs       {self.most}{self.flops:.1e} of training",
                f"#   memory      {self.memory / 1e9:.0f} GB a device",
                f"#   hardware    {trainer.processes} × A100 40 GB{how}; {time} if they reach {USED:.0%} of their peak",
                "",
            ]
        )


@cache
def pretraining(path: Path) -> Work:
    config = build(PretrainConfig, [path], {})
    model, data, steps = resolve(config.model), config.data, config.trainer.max_steps or 0
    sequences = steps * data.batch_size
    share = data.batch_size / config.trainer.processes
    at_once = min(data.micro_batch_size or share, share)
    sides = lengths(model, data.sequence_length, config.objective)
    tokens = sequences * data.sequence_length
    return Work(model, data.new_tokenizer.vocab_size, config.trainer, tokens, sequences, at_once, *sides)


@cache
def finetuning(path: Path) -> Work:
    """Every row at the longest that is allowed."""
    config = build(FinetuneConfig, [path], {})
    data, trainer, steps = config.data, config.trainer, config.trainer.max_steps or 0
    model, vocab_size = resolve(config.model), data.new_tokenizer.vocab_size
    if config.init_from:
        start = pretraining(RECIPES / "pretrain" / f"{Path(config.init_from).parent.name}.yaml")
        model, vocab_size = start.model, start.vocab_size
    kind = TASKS[config.task.name].kind
    source, target = data.sequence_length, data.target_length if kind == "text" else 0
    rows = data.batch_tokens / (source + target) if data.batch_tokens else data.batch_size
    texts = 2 if kind == "retrieval" else 1  # a query and a document
    share = rows / trainer.processes
    at_once = texts * min(data.micro_batch_size or share, share)
    sequences = steps * rows * texts
    lengths = {"source": source, "target": target, "predicted": target}
    tokens = sequences * (source + target)
    return Work(model, vocab_size, trainer, tokens, sequences, at_once, **lengths, most="at most ")


def work(path: Path) -> Work:
    return pretraining(path) if path.parent.name == "pretrain" else finetuning(path)


@pytest.mark.parametrize("path", [*PRETRAIN, *FINETUNE], ids=lambda path: path.stem)
def test_a_recipe_says_what_it_costs_and_fits_its_hardware(path: Path) -> None:
    assert work(path).head in path.read_text(), "the head should be:\n" + work(path).head
    assert work(path).memory + LIBRARIES < MEMORY
    table = (RECIPES.parent.parent / "docs" / "recipes.md").read_text()
    assert work(path).row(path) in table, "docs/recipes.md should have:\n" + work(path).row(path)


@pytest.mark.parametrize("path", [*PRETRAIN, *FINETUNE], ids=lambda path: path.stem)
def test_the_model_of_a_recipe_can_be_built(path: Path) -> None:
    """On the meta device, which has shapes and no memory, with the sequences that a device computes at a time."""
    made = work(path)
    with torch.device("meta"):
        model = make_model(made.model, made.vocab_size)
        source, target = (
            torch.zeros(int(made.at_once), tokens, dtype=torch.long) for tokens in (made.source, made.target)
        )
        memory = model.encode(source) if made.source else None
        states = model.decode(target, memory=memory) if memory is None or made.target else memory.states_BSC
        logits = model.logits(states[:, -1:])
    assert sum(parameter.numel() for parameter in model.parameters()) == made.parameters
    assert logits.shape == (int(made.at_once), 1, made.vocab_size)


def test_published_models_have_the_published_sizes() -> None:
    assert work(RECIPES / "pretrain" / "bert-base.yaml").parameters == 109_514_298 - 2 * 768  # less its two segments
    assert work(RECIPES / "pretrain" / "gpt2-small.yaml").parameters == 124_439_808
    t5 = work(RECIPES / "pretrain" / "t5-base.yaml")
    assert t5.parameters == 247_577_856 and (t5.source, t5.target) == (512, 114)


@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.stem)
def test_what_a_recipe_reads_is_in_the_catalogue_or_said(path: Path) -> None:
    config = build(PretrainConfig, [path], {})
    assert all(name in catalogue.ENTRIES or "/" in name for name in config.data.corpus)
    assert config.run_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", FINETUNE, ids=lambda path: path.stem)
def test_a_recipe_of_fine_tuning_starts_from_one_of_pretraining(path: Path) -> None:
    config = build(FinetuneConfig, [path], {})
    entry = catalogue.ENTRIES[str(config.data.train)]
    assert entry.kind == config.task.name
    assert work(path).model.family in TASKS[config.task.name].families
    assert config.run_dir == f"runs/{path.stem}"


def test_the_folders_of_babylm_are_read_as_the_recipes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("train_10M/bnc_spoken.train", "train_10M/childes.train", "dev/bnc_spoken.dev")):
        path = tmp_path / "babylm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(novel(number))
    monkeypatch.chdir(tmp_path)
    data = build(PretrainConfig, [RECIPES / "pretrain" / "babylm-10m.yaml"], {"data.workers": "1"}).data
    splits = {entry.name: entry.parts[0].split for entry in scan(data).entries}
    assert splits == {"bnc_spoken.train": "train", "childes.train": "train", "bnc_spoken.dev": "validation"}
