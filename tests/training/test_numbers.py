"""Numbers stay right where there is hardly anything to compute with, and come again when a run is repeated."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from pipeline import cli
from pipeline.bundle import load_bundle, make_model
from pipeline.model.config import ModelConfig, resolve
from pipeline.training import callbacks
from pipeline.training.callbacks import measured_peak
from pipeline.training.config import Precision
from pipeline.training.optim import numbers_of
from pipeline.training.run import rank
from tests.training.jobs import arguments, rows, write_novels
from tests.training.test_module import broken

FEW: dict[str, Any] = {"trainer__max_steps": 6, "trainer__validate_every": 3, "trainer__log_every": 1}


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_novels(tmp_path_factory.mktemp("corpus") / "novels")


def trained(novels: Path, run: Path, **more: Any) -> Path:
    assert cli.main(arguments(novels, run, **FEW | {"data__stores": novels.parent / "stores"} | more)) == 0
    losses = [row[key] for row in rows(run) for key in ("train/loss", "val/loss") if key in row]
    assert losses and all(map(math.isfinite, losses))
    return run


def weights(run: Path) -> bytes:
    return (run / "bundle" / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(novels: Path, tmp_path: Path) -> None:
    """Dropout is on."""
    once, twice = trained(novels, tmp_path / "once"), trained(novels, tmp_path / "twice")
    assert weights(once) == weights(twice) and rows(once) == rows(twice)
    assert weights(trained(novels, tmp_path / "other", seed=2)) != weights(once)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_an_overflow_in_mixed_precision_costs_its_step_only(kind: str, novels: Path, tmp_path: Path) -> None:
    with broken(kind, range(2, 3)):
        run = trained(novels, tmp_path / "run", trainer__precision="bf16-mixed")
    assert [row["train/skipped_steps"] for row in rows(run) if "train/skipped_steps" in row][-1] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in load_bundle(run / "bundle").model.state_dict().values())


@pytest.mark.parametrize("slow", ["bf16-mixed", "32"])
def test_16_bits_without_hardware_for_them_get_a_warning(
    slow: str, novels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks, "measured_peak", lambda _, precision: 1e9 if precision == slow else 2e9)
    trained(novels, tmp_path / "run", trainer__precision="bf16-mixed")
    warned = [line for line in capsys.readouterr().err.splitlines() if "trainer.precision" in line]
    assert len(warned) == (slow == "bf16-mixed")


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_an_epoch_of_one_example_and_a_vocabulary_that_nothing_divides(family: str, tmp_path: Path) -> None:
    """One window a step, one step an epoch; 397 tokens, a prime."""
    novels = write_novels(tmp_path / "novels", count=1, paragraphs=1)
    short: dict[str, Any] = {
        "data__sequence_length": 4000,
        "data__batch_size": 1,
        "data__new_tokenizer__vocab_size": 397,
    }
    run = trained(novels, tmp_path / "run", family=family, **short)
    assert load_bundle(run / "bundle").tokenizer.vocab_size == 397
    assert json.loads((run / "prepared.json").read_text())["steps"] == 6


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder", "recurrent"])
def test_a_batch_of_nothing_but_padding_gives_numbers_and_gradients(family: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model(resolve(ModelConfig(family=family, size="tiny", zero_output=False)), 101)
    ids_BT, nothing_BT = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.bool)
    memory = model.encode(ids_BT, nothing_BT) if family != "decoder" else None
    states = memory.states_BSC if memory and family == "encoder" else model.decode(ids_BT, nothing_BT, memory)
    model.logits(states).sum().backward()
    assert bool(states.isfinite().all())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.bfloat16)]
)
def test_the_peak_is_that_of_the_numbers_a_run_computes_with(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, dtype: torch.dtype
) -> None:
    """A share of the peak of other numbers would say nothing; Lightning's own choice on a CPU is the witness."""
    connector = pl.Trainer(
        accelerator="cpu",
        precision="32-true" if precision == "32" else precision,
        logger=False,
        enable_checkpointing=False,
    )
    with connector.precision_plugin.forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert numbers_of(torch.device("cuda"), "16-mixed") == torch.float16
    kinds = []
    randn = torch.randn

    def noted(*shape: int, **options: Any) -> torch.Tensor:
        kinds.append(options["dtype"])
        return randn(2, 2)

    monkeypatch.setattr(torch, "randn", noted)
    assert measured_peak(torch.device("cpu"), precision) > 0
    assert kinds == [dtype]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, 0),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 5),
        ({"NODE_RANK": "2", "LOCAL_RANK": "1"}, 9),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "LOCAL_RANK": "2"}, 2),
    ],
    ids=["alone", "torchrun", "Lightning", "srun", "Lightning in a shell of srun"],
)
def test_the_number_of_a_process(told: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert rank(4) == expected


def test_what_a_recurrent_model_does_not_train_does_not_count(tmp_path: Path) -> None:
    """Causal pretraining takes its decoder alone: parameters at W&B, FLOPs and the share of the peak are of that."""
    novels = write_novels(tmp_path / "novels", count=2)
    run = trained(novels, tmp_path / "run", family="recurrent", trainer__max_steps=1, trainer__log_every=1)
    model = load_bundle(run / "bundle").model
    assert model.decoder is not None
    parts = [model.decoder, model.head]
    numbers = sum({p: p.numel() for part in parts for p in part.parameters()}.values())
    row = next(row for row in rows(run) if "flops" in row)
    assert row["flops"] == pytest.approx(6 * row["tokens_computed"] * numbers, rel=0.01)
