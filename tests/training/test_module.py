"""The loss, its gradient and what is measured, against plain computations that share no code with them."""

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeline import cli
from pipeline.bundle import Model, load_bundle, make_model
from pipeline.configuration import build
from pipeline.data.batch import Batch, collate
from pipeline.data.config import CorpusConfig
from pipeline.data.corpus import scan
from pipeline.data.datamodule import Share
from pipeline.data.objectives import IGNORED, Example
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.cost import count_flops
from pipeline.model.heads import LOSS_CHUNK, LanguageHead, loss_and_gradient
from pipeline.tokenizer import Tokenizer
from pipeline.training import callbacks, checkpoint
from pipeline.training.config import PretrainConfig
from pipeline.training.job import Job
from pipeline.training.module import Network
from pipeline.training.pretraining import make_job
from pipeline.training.run import opened
from pipeline.training.validation import measure, validate
from tests.training.jobs import arguments, rows, write_novels

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So little text that a few steps are an epoch; documents end inside windows."""
    return write_novels(tmp_path_factory.mktemp("corpus") / "novels", count=4, paragraphs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of this module are, so that they share tokenizer stores."""
    return tmp_path_factory.mktemp("runs")


PLAIN: dict[str, Any] = {"model__dropout": 0.0, "tracking__samples_every": 0, "data__validation_fraction": 0.0}


def trained(novels: Path, run: Path, **more: Any) -> Path:
    """A run that was trained in this process."""
    words = arguments(novels, run, **PLAIN | more)
    assert cli.main(words) == 0
    return run


def made(novels: Path, folder: Path, **more: Any) -> Job:
    """A job that is ready to train but does not."""
    words = arguments(novels, folder / "made", **PLAIN | more)[1:]
    keys, values = words[::2], words[1::2]
    typed = {key[2:]: value for key, value in zip(keys, values, strict=True)}
    typed["data.corpus"] = json.dumps([typed["data.corpus"]])
    config = build(PretrainConfig, [], typed)
    run = folder / f"job-{abs(hash(tuple(words)))}"
    with opened(replace(config, run_dir=str(run)), "job") as entered:
        job = make_job(config, entered)
    stir(job.model)
    return job


def test_weights_in_parts_take_a_part_of_the_memory(novels: Path, folder: Path) -> None:
    settings = {"family": "decoder", "trainer__devices": 2, "data__micro_batch_size": 1}
    whole, parts = (made(novels, folder, **settings, trainer__strategy=kind) for kind in ("ddp", "fsdp"))
    weights = 16 * sum(parameter.numel() for parameter in whole.model.parameters())
    assert whole.memory(whole.first_batch()) - parts.memory(parts.first_batch()) == weights / 2


def stir(model: nn.Module) -> None:
    """Weights that do something: the first ones make every block the identity."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def weights_of(run: Path) -> dict[str, Tensor]:
    return load_bundle(run / "bundle").model.state_dict()


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].shape == other[name].shape, name
        assert float((one[name] - other[name]).abs().max()) <= tolerance, name


# --- The loss ----------------------------------------------------------------------------------------------------


def full_logits(model: Model, batch: Batch) -> Tensor:
    """Logits of every position, computed the plain way."""
    memory = None if batch.source_BS is None else model.encode(batch.source_BS, batch.source_real_BS)
    if batch.inputs_BT is None:
        assert memory is not None
        return model.logits(memory.states_BSC)
    return model.logits(model.decode(batch.inputs_BT, batch.inputs_real_BT, memory, batch.prefix_B))


CASES = [
    ("encoder", "masked", "modern"),
    ("encoder", "masked", "bert"),
    ("decoder", "causal", "gpt2"),
    ("decoder", "masked", "modern"),
    ("decoder", "prefix", "modern"),
    ("encoder-decoder", "span", "t5"),
    ("encoder-decoder", "prefix", "modern"),
    ("recurrent", "causal", "modern"),
]


@pytest.mark.parametrize(("family", "objective", "preset"), CASES)
def test_the_loss_is_the_cross_entropy_of_full_logits(
    family: str, objective: str, preset: str, novels: Path, folder: Path
) -> None:
    """In value and gradient; of each position too; and a batch of weight zero gives zeros everywhere, not nothing."""
    job = made(
        novels,
        folder,
        family=family,
        objective__name=objective,
        model__preset=preset,
        model__attention_dropout=0,
        model__activation_dropout=0,
    )
    module, batch = job.training(), job.first_batch()
    logits = full_logits(job.model, batch)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = module.network(batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    parameters = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, parameters)
    wanted = torch.autograd.grad(expected, parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6)
    each = module.network(batch, each=True)
    assert len(each) == batch.loss_positions and float(each.sum()) == pytest.approx(float(expected), rel=1e-5)

    nothing = module.network(collate([], pad=job.tokenizer.pad, like=job.examples[0, 0, 0]))
    zeros = torch.autograd.grad(nothing, parameters)  # fails for a weight that took no part
    assert float(nothing) == 0 and all(not gradient.any() for gradient in zeros)


def head(vocab_size: int = 97, **settings: Any) -> LanguageHead:
    torch.manual_seed(5)
    config: Any = {"family": "decoder", "size": "tiny", "width": 16} | settings
    made = LanguageHead(resolve(ModelConfig(**config)), vocab_size)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("settings", [{}, {"logit_soft_cap": 5.0}, {"preset": "bert"}, {"preset": "t5"}])
@pytest.mark.parametrize("positions", [2 * LOSS_CHUNK + 300, 7])
def test_the_loss_in_chunks_is_that_of_all_logits(positions: int, settings: dict[str, Any], smoothing: float) -> None:
    """Value and gradients, for the states and for every weight of the head."""
    layer = head(**settings)
    states = torch.randn(positions, 16, requires_grad=True)
    targets = torch.randint(0, 97, (positions,))
    logits = layer.output(layer.transform(states) * layer.scale)
    if "logit_soft_cap" in settings:
        logits = 5.0 * torch.tanh(logits / 5.0)
    nats = -logits.double().log_softmax(-1)
    own = nats[torch.arange(positions), targets]
    expected = ((1 - smoothing) * own + smoothing * nats.mean(-1)).sum()
    loss = layer.loss(states, targets, smoothing)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    inputs = [states, *layer.parameters()]
    for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_in_mixed_precision_is_near_that_of_all_numbers(smoothing: float) -> None:
    """Products in bfloat16, sums in float32: the loss within a thousandth, gradients within the rounding."""
    layer = head(output_bias=True)
    states, targets = torch.randn(LOSS_CHUNK + 50, 16, requires_grad=True), torch.randint(0, 97, (LOSS_CHUNK + 50,))
    wide = layer.loss(states, targets, smoothing)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = layer.loss(states, targets, smoothing)
    assert narrow.dtype == torch.float32 and float(narrow) == pytest.approx(float(wide), rel=1e-3)
    inputs = [states, *layer.parameters()]
    for one, other in zip(torch.autograd.grad(narrow, inputs), torch.autograd.grad(wide, inputs), strict=True):
        assert one.dtype == other.dtype and float((one - other).norm() / other.norm()) < 0.03


def test_the_loss_of_large_logits_is_exact() -> None:
    """Sums of logits would lose what is left between them."""
    logits = torch.randn(LOSS_CHUNK, 50) + 1_000_000
    targets = torch.arange(LOSS_CHUNK) % 50
    logits[torch.arange(LOSS_CHUNK), targets] += torch.arange(LOSS_CHUNK) % 8
    expected = F.cross_entropy(logits.double(), targets, reduction="sum")
    loss, _ = loss_and_gradient(logits.clone(), targets[:, None], 0.0, 0.0)
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)


def test_rare_words_get_their_gradient_in_16_bits() -> None:
    """It is made before a scaler of losses can help, so it is not made of 16 bits."""
    layer = head(2000)
    with torch.no_grad():
        layer.output.weight.mul_(0.3)
        layer.output.weight[1000:] -= 1.5  # hardly ever expected
    states, targets = torch.rand(64, 16, requires_grad=True), torch.randint(0, 1000, (64,))
    wide = torch.autograd.grad(layer.loss(states, targets), layer.output.weight)[0]
    with torch.autocast("cpu", torch.float16):
        narrow = torch.autograd.grad(layer.loss(states, targets), layer.output.weight)[0]
    assert float((narrow - wide)[1000:].norm() / wide[1000:].norm()) < 0.02


def peak_memory(work: Callable[[], object]) -> int:
    """The most bytes that a piece of work holds at once, of tensors it makes itself."""
    work()  # whatever is made once is made now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.max(np.cumsum(changes)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("settings", [{}, {"logit_soft_cap": 5.0}])
def test_logits_of_more_than_a_chunk_never_exist(settings: dict[str, Any], smoothing: float) -> None:
    """Eight chunks of positions need far less memory than their logits, which the plain way needs."""
    positions, vocab_size = 8 * LOSS_CHUNK, 600
    layer = head(vocab_size, **settings)
    states, targets = torch.randn(positions, 16, requires_grad=True), torch.randint(0, vocab_size, (positions,))
    every_logit = 4 * positions * vocab_size
    assert peak_memory(lambda: F.cross_entropy(layer(states), targets, reduction="sum").backward()) >= every_logit
    assert peak_memory(lambda: layer.loss(states, targets, smoothing).backward()) < 0.6 * every_logit
    assert peak_memory(lambda: layer.losses(states, targets)) < 0.6 * every_logit


def test_only_positions_with_loss_are_projected() -> None:
    """One masked token in each of eight sequences of 128: far less memory than the logits of every position."""
    vocab_size, rows_, length = 8000, 8, 128
    torch.manual_seed(6)
    model = make_model(resolve(ModelConfig(family="encoder", size="tiny", width=32, layers=1)), vocab_size)
    targets = np.full(length, IGNORED)
    targets[5] = 77
    ids = np.arange(length)
    batch = collate([Example(source=ids, targets=targets, tokens=length)] * rows_, pad=0)
    network = Network(model)
    every_logit = 4 * rows_ * length * vocab_size
    assert peak_memory(lambda: full_logits(model, batch).sum().backward()) >= every_logit
    assert peak_memory(lambda: network(batch).backward()) < 0.3 * every_logit


# --- A step ------------------------------------------------------------------------------------------------------

STEADY = {"optim__epsilon": 1e-4, "optim__schedule": "constant", "optim__warmup_steps": 0, "optim__clip": 0.5}
"""An epsilon so large that rounding errors of small gradients are not blown up to whole steps."""
UNEVEN = {"objective__unit": "word", "objective__rate": 0.3, "data__within_documents": True}
"""Micro-batches with different numbers of positions that carry loss."""
SHORT = {"trainer__max_steps": 14, "trainer__log_every": 1, "trainer__validate_every": 7, "trainer__save_every": 14}


@pytest.fixture(scope="module")
def accumulated(novels: Path, folder: Path) -> Callable[[str, int], Path]:
    """Runs of more than an epoch that differ in their micro-batches alone."""

    def run(family: str, micro: int) -> Path:
        path = folder / f"{family}-{micro}"
        if not path.exists():
            settings = STEADY | SHORT | (UNEVEN if family == "encoder" else {"data__within_documents": True})
            trained(novels, path, family=family, data__micro_batch_size=micro, **settings)
        return path

    return run


@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
@pytest.mark.parametrize("micro", [4, 3])
def test_micro_batches_change_nothing(
    family: str, micro: int, accumulated: Callable[[str, int], Path], novels: Path, folder: Path
) -> None:
    """Weights, losses and gradient norms; the last batch of an epoch is smaller and leaves micro-batches empty."""
    whole, parts = accumulated(family, 8), accumulated(family, micro)
    settings = UNEVEN if family == "encoder" else {"data__within_documents": True}
    job = made(novels, folder, family=family, data__micro_batch_size=micro, **settings)
    last = job.steps.per_epoch - 1
    assert last < 13 and len(job.steps.keys(last)) < 8, "the run should pass an epoch that does not divide"
    uneven = 0
    for step in range(last):
        first, second, *_ = Share(0, 1, micro).parts(job.steps.keys(step), 8)
        sizes = [collate([job.examples[key] for key in keys], 0).loss_positions for keys in (first, second)]
        uneven += sizes[0] != sizes[1]
    assert uneven >= 2, "micro-batches should carry different weights"
    assert [] in Share(0, 1, micro).parts(job.steps.keys(last), 8)

    assert_same_weights(weights_of(whole), weights_of(parts), 2e-6)
    for one, other in zip(rows(whole), rows(parts), strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"flops", "tokens_computed"}:  # these count padding
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), f"{key} at step {one['step']}"


@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_a_run_is_the_plain_loop_that_everybody_would_write(
    family: str, accumulated: Callable[[str, int], Path], novels: Path, folder: Path
) -> None:
    """Mean over all positions of the batch, clipping, AdamW: the same weights and the same losses as logged."""
    settings = STEADY | (UNEVEN if family == "encoder" else {"data__within_documents": True})
    run, job = accumulated(family, 3), made(novels, folder, family=family, **settings | SHORT)
    torch.manual_seed(1)  # the seed of the run: its first weights
    model = make_model(job.model.architecture, job.model.vocab_size)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-4)
    logged = [row for row in rows(run) if "train/loss" in row]
    for step in range(14):
        batch = collate([job.examples[key] for key in job.steps.keys(step)], job.tokenizer.pad)
        logits = full_logits(model, batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert logged[step]["train/loss"] == pytest.approx(float(loss), rel=1e-4)
        assert logged[step]["train/gradient_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert_same_weights(weights_of(run), model.state_dict(), 2e-6)


@contextmanager
def broken(kind: str, steps: range) -> Iterator[None]:
    """Let the loss, or the gradient alone, of some steps be no number."""
    forward, calls = Network.forward, iter(range(10_000))

    def breaking(self: Network, batch: Batch, each: bool = False) -> Tensor:
        loss = forward(self, batch, each)
        if not self.training or each or next(calls) not in steps:
            return loss
        if kind == "loss":
            return loss * math.nan
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "forward", breaking)
        yield


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(
    kind: str, optimizer: str, novels: Path, tmp_path: Path, folder: Path
) -> None:
    """Steps 3 and 4 are broken: they move neither weights nor moments, the run goes on and logs finite losses."""
    settings = {
        "optim__name": optimizer,
        "trainer__max_steps": 6,
        "trainer__log_every": 1,
        "trainer__validate_every": 6,
    }
    stores = {"data__stores": folder / "stores"}
    with broken(kind, range(2, 4)):
        run = trained(novels, tmp_path / "run", trainer__save_every=1, trainer__keep=9, **settings, **stores)
    states = [saved.read() for saved in checkpoint.found(run)]
    assert [state["progress"]["step"] for state in states] == [1, 2, 3, 4, 5, 6]
    assert [state["progress"]["skipped"] for state in states] == [0, 0, 1, 2, 2, 2]
    assert_same_weights(states[1]["model"], states[3]["model"], 0.0)
    for name, moments in states[1]["optimizer"]["state"].items():
        assert_same_weights(moments, states[3]["optimizer"]["state"][name], 0.0)
    assert any(not torch.equal(states[3]["model"][name], states[4]["model"][name]) for name in states[3]["model"])
    logged = {row["step"]: row for row in rows(run) if "train/skipped_steps" in row}
    assert [logged[step]["train/skipped_steps"] for step in range(1, 7)] == [0, 0, 1, 2, 2, 2]
    assert all(math.isfinite(row["train/loss"]) for step, row in logged.items() if step not in (3, 4))
    assert logged[4]["tokens"] > logged[3]["tokens"] > logged[2]["tokens"]  # what was read counts


def test_metrics_of_skipped_steps_are_no_loss_of_zero(novels: Path, tmp_path: Path, folder: Path) -> None:
    """A row between which nothing was learnt must not look like a perfect model, and metrics.jsonl stays JSON."""
    settings = {"trainer__max_steps": 4, "trainer__log_every": 1, "data__stores": folder / "stores"}
    with broken("loss", range(1, 2)):
        run = trained(novels, tmp_path / "run", **settings)
    lines = (run / "metrics.jsonl").read_text().splitlines()

    def no_json(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    read = [json.loads(line, parse_constant=no_json) for line in lines]
    assert [row for row in read if row.get("train/loss") == 0] == []


def test_too_many_broken_steps_end_the_run_with_its_last_good_state(
    novels: Path, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"trainer__bad_steps": 3, "trainer__save_every": 2, "data__stores": folder / "stores"}
    words = arguments(novels, tmp_path / "run", **PLAIN | settings)
    ended: list[str] = []

    @contextmanager
    def bar(name: str, *_: object) -> Iterator[Callable[[float], None]]:
        yield lambda _: None
        ended.append(name)

    monkeypatch.setattr(callbacks, "progress", bar)
    with broken("loss", range(4, 100)):
        assert cli.main(words) == 2
    assert ended == ["training"], "the bar goes on below the error"
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "no finite gradient for 3 steps" in errors[0] and "Traceback" not in errors[0]
    found = checkpoint.newest(tmp_path / "run")
    assert found is not None
    saved, state = found
    assert saved.step in (4, 6) and all(bool(tensor.isfinite().all()) for tensor in state["model"].values())
    assert not (tmp_path / "run" / "bundle").exists()
    assert cli.main(["pretrain", "--resume", str(tmp_path / "run")]) == 0  # whatever broke it is mended


def test_a_lower_rate_on_resume_is_the_rate_that_is_used(novels: Path, tmp_path: Path, folder: Path) -> None:
    """What the message of a broken run advises: settings of the optimizer come from the command, not the checkpoint."""
    run, stores = tmp_path / "run", {"data__stores": folder / "stores"}
    steady = STEADY | {"trainer__bad_steps": 2, "trainer__save_every": 3, "trainer__log_every": 1}
    with broken("loss", range(3, 100)):
        assert cli.main(arguments(novels, run, **PLAIN | steady | stores)) == 2
    lower = ["--optim.lr", "0.0001", "--optim.weight_decay", "0.7"]
    assert cli.main(["pretrain", "--resume", str(run), *lower]) == 0
    logged = [row for row in rows(run) if "train/lr" in row]
    assert {row["train/lr"] for row in logged if row["step"] <= 3} == {1e-3}
    assert {row["train/lr"] for row in logged if row["step"] > 3} == {1e-4}
    found = checkpoint.newest(run)
    assert found is not None
    decays = {group["weight_decay"] for group in found[1]["optimizer"]["param_groups"]}
    assert decays == {0.7, 0.0}


def test_a_signal_in_the_backward_pass_is_not_lost(novels: Path, tmp_path: Path, folder: Path) -> None:
    """Most signals come there, since most of the time is spent there; the next one is for whom it was before."""
    forward, calls, before = Network.forward, iter(range(10_000)), signal.getsignal(signal.SIGTERM)

    def signalled(self: Network, batch: Batch, each: bool = False) -> Tensor:
        loss = forward(self, batch, each)
        if self.training and not each and next(calls) == 5:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "forward", signalled)
        words = arguments(novels, tmp_path / "run", **PLAIN | {"data__stores": folder / "stores"})
        assert cli.main(words) == 75
    assert signal.getsignal(signal.SIGTERM) == before
    found = checkpoint.newest(tmp_path / "run")
    assert found is not None and found[0].step in (6, 7)


# --- Validation --------------------------------------------------------------------------------------------------


def measuring(job: Job) -> Any:
    """A module that can measure without being trained."""
    module = job.training()
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return module


EVERYTHING = {"trainer__validation_samples": 0}


def test_dropout_is_off_in_validation_and_masks_are_pinned(novels: Path, folder: Path) -> None:
    """Measured twice, and with another seed, the result is the same to the last bit; training mode comes back."""
    for family in ("encoder", "decoder", "encoder-decoder"):
        dropout = {"model__dropout": 0.5, "model__attention_dropout": 0.5, "model__activation_dropout": 0.5}
        job = made(novels, folder, family=family, **dropout)
        other = made(novels, folder, family=family, seed=77, **dropout)
        other.model.load_state_dict(job.model.state_dict())
        module = measuring(job)
        module.train()
        torch.manual_seed(1)
        first = validate(job, module)
        assert all(part.training for part in module.network.modules())
        torch.manual_seed(2)
        assert validate(job, module) == first
        again = validate(other, measuring(other))
        assert again["val/loss"] == first["val/loss"] and again["val/gap"] == first["val/gap"]


def test_validation_examples_do_not_depend_on_the_order_or_the_run(novels: Path, folder: Path) -> None:
    jobs = [made(novels, folder, family="encoder", seed=seed) for seed in (1, 2)]
    one, other = (job.held_out("validation", job.examples.objective) for job in jobs)
    assert one.numbers == other.numbers
    for number in reversed(one.numbers):
        for name in ("source", "targets"):
            np.testing.assert_array_equal(getattr(one.example(number), name), getattr(other.example(number), name))
    sources = [jobs[0].examples[0, epoch, 0].source for epoch in (0, 1)]
    assert sources[0] is not None and sources[1] is not None
    assert (sources[0] != sources[1]).any(), "the masks of training should change with the epoch"


def nats_of_targets(model: Model, example: Example) -> list[tuple[int, int, float]]:
    """Position, token and nats of everything that an example predicts, alone in its batch."""
    with torch.no_grad():
        chances = full_logits(model, collate([example], pad=0))[0].double().log_softmax(-1)
    places = np.flatnonzero(example.targets != IGNORED)
    return [
        (int(place), int(example.targets[place]), -float(chances[place, example.targets[place]])) for place in places
    ]


def plain_bytes(tokenizer: Tokenizer, token: int) -> int:
    """UTF-8 bytes of a token of text, by the tokenizers library: one character stands for each byte."""
    if tokenizer.backend.get_added_tokens_decoder().get(token):
        return 0
    return len(tokenizer.backend.id_to_token(token) or "")


@pytest.mark.parametrize("within_documents", [False, True])
def test_bits_per_byte_of_a_decoder(within_documents: bool, novels: Path, folder: Path) -> None:
    """All of the held-out text, window by window; its bytes are those of the cleaned text, and end tokens add neither.

    The second half of a window begins in the middle of that window, also of a short one.
    """
    job = made(novels, folder, family="decoder", data__within_documents=within_documents, **EVERYTHING)
    corpus = scan(CorpusConfig(corpus=[str(novels)], validation_fraction=0.0, workers=1))
    text_bytes = sum(len(text.encode()) for text in corpus.texts("validation"))
    model, begin, end = job.model.eval(), job.tokenizer.id("begin"), job.tokenizer.id("end")
    nats = late_nats = 0.0
    late_bytes = ends = tokens = 0
    lengths = set()
    for window in job.windows("validation"):
        ids = window.astype(np.int64)
        lengths.add(len(ids))
        with torch.no_grad():
            read = torch.tensor([[begin, *ids[:-1].tolist()]])
            chances = model.logits(model.decode(read))[0].double().log_softmax(-1)
        for place, token in enumerate(ids.tolist()):
            tokens += 1
            if token == end:
                ends += 1
                continue
            nats -= float(chances[place, token])
            if place >= len(ids) // 2:
                late_nats -= float(chances[place, token])
                late_bytes += plain_bytes(job.tokenizer, token)
    assert ends == 4 and len(lengths) > 1, "documents should end, and a window be shorter than others"
    found = measure(job, measuring(job), "validation", job.examples.objective)
    assert found["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)
    assert found["val/continuation_bits_per_byte"] == pytest.approx(late_nats / math.log(2) / late_bytes, rel=1e-5)


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_bits_per_byte_after_a_prefix(family: str, novels: Path, folder: Path) -> None:
    """The second half of each window, given the first: all that is predicted, so both measures are one."""
    job = made(novels, folder, family=family, objective__name="prefix", **EVERYTHING)
    model, begin, end = job.model.eval(), job.tokenizer.id("begin"), job.tokenizer.id("end")
    nats, size = 0.0, 0
    for window in job.windows("validation"):
        ids = window.astype(np.int64).tolist()
        half = len(ids) // 2
        with torch.no_grad():
            if family == "decoder":
                read, prefix = torch.tensor([[begin, *ids[:-1]]]), torch.tensor([half + 1])
                states = model.decode(read, prefix_B=prefix)[:, half:]
            else:
                memory = model.encode(torch.tensor([[*ids[:half], end]]))
                states = model.decode(torch.tensor([[begin, *ids[half:-1]]]), memory=memory)
            chances = model.logits(states)[0].double().log_softmax(-1)
        for place, token in enumerate(ids[half:]):
            if token != end:
                nats -= float(chances[place, token])
                size += plain_bytes(job.tokenizer, token)
    found = measure(job, measuring(job), "validation", job.examples.objective)
    assert found["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["val/continuation_bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_the_validation_loss_is_a_mean_over_tokens(family: str, novels: Path, folder: Path) -> None:
    """Not a mean of the means of batches; and no family but those that predict text has bits per byte."""
    settings = {"objective__unit": "word", "data__within_documents": True, "data__micro_batch_size": 3} | EVERYTHING
    job = made(novels, folder, family=family, **settings)
    examples = job.held_out("validation", job.examples.objective)
    model = job.model.eval()
    by_window = [
        [nats for _, _, nats in nats_of_targets(model, examples.example(number))] for number in examples.numbers
    ]
    assert len(by_window) == len(job.windows("validation"))
    expected = sum(map(sum, by_window)) / sum(map(len, by_window))
    batches = [np.concatenate(by_window[start : start + 3]) for start in range(0, len(by_window), 3)]
    mean_of_means = float(np.mean([batch.mean() for batch in batches]))
    found = measure(job, measuring(job), "validation", job.examples.objective)
    assert found == {"val/loss": pytest.approx(expected, rel=1e-6)}
    assert abs(mean_of_means - expected) > 1e-4, "the two should differ, or nothing is shown"


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("samples", [0, 7])
def test_every_validation_example_comes_once_over_all_processes(
    processes: int, samples: int, novels: Path, folder: Path
) -> None:
    """And every process computes equally many batches: where weights are cut into parts, all must take part."""
    job = made(novels, folder, family="decoder", trainer__validation_samples=samples)
    examples = job.held_out("validation", job.examples.objective)
    shares = [list(examples.batches(Share(rank, processes, 2), job.tokenizer.pad)) for rank in range(processes)]
    read = sorted(tuple(row) for batches in shares for batch in batches if batch.samples for row in batch_rows(batch))
    assert read == sorted(tuple(examples.example(number).targets.tolist()) for number in examples.numbers)
    assert len({len(batches) for batches in shares}) == 1


def batch_rows(batch: Batch) -> list[list[int]]:
    return [[token for token in row if token != IGNORED] for row in cast(list[list[int]], batch.targets_BT.tolist())]


# --- Metrics -----------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_windows_that_were_read(novels: Path, folder: Path) -> None:
    """Causal: every position of every window; masked: the vocabulary only where there is loss."""
    settings = {"trainer__max_steps": 5, "trainer__log_every": 1, "data__within_documents": False}
    for family in ("decoder", "encoder"):
        run = trained(novels, folder / f"flops-{family}", family=family, **settings)
        bundle = load_bundle(run / "bundle")
        model, vocab_size = bundle.model.architecture, bundle.model.vocab_size
        logged = [row for row in rows(run) if "train/loss" in row]
        steps = [
            {axis: row[axis] - before[axis] for axis in ("tokens", "flops", "tokens_loss", "tokens_computed")}
            for before, row in pairwise(logged)
        ]
        whole = [step for step in steps if step["tokens"] == 8 * 32]  # no short window
        assert len(whole) >= 3
        for step in whole:
            if family == "decoder":
                assert step["flops"] == 8 * count_flops(model, vocab_size, 0, 32, 32).training
                assert step["tokens_loss"] == step["tokens_computed"] == 8 * 32
                continue
            without, one = (count_flops(model, vocab_size, 33, 0, positions).training for positions in (0, 1))
            assert step["flops"] == 8 * without + step["tokens_loss"] * (one - without)
            assert step["tokens_computed"] == 8 * 33 and 0.1 < step["tokens_loss"] / step["tokens"] < 0.2


def test_the_axes_of_metrics_only_grow(accumulated: Callable[[str, int], Path]) -> None:
    """Step, tokens, operations and seconds; each kind of row once a step."""
    for run in (accumulated("encoder", 3), accumulated("encoder-decoder", 8)):
        read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for axis in ("step", "tokens", "flops", "seconds", "tokens_computed", "tokens_loss"):
            values = [row[axis] for row in read]
            assert values == sorted(values) and values[-1] > values[0], axis
        for kind in ("train/loss", "val/loss"):
            steps = [row["step"] for row in read if kind in row]
            assert len(steps) == len(set(steps)) and steps[-1] == 14
        assert [row["step"] for row in read if "train/loss" in row] == list(range(1, 15))
