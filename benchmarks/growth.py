"""How time and memory of a training step grow, beside GPT-2 of transformers; and what a second process gives.

    python -m benchmarks.growth --rounds 5

A decoder of 4 blocks, vocabulary 8192, float32, AdamW, dropout 0; every row is two processes, ours and the peer's, a
step each in turn. Memory is what training adds to the imports at its highest. Two processes are `triptych pretrain`
with `trainer.devices` 1 and 2 and a thread for each process.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Step, Worker, arguments_of, in_turn, save, small_job, triptych, typed
from benchmarks.training import Loss, hugging_face_loss, make_step, matrix_peak
from pipeline.bundle import make_model
from pipeline.data.batch import Batch
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.cost import count_flops
from pipeline.terminal import note, print_table
from pipeline.training.module import Network
from pipeline.training.run import Run

VOCABULARY, BLOCKS = 8192, 4
Shape = tuple[int, int, int]  # width, sequences, tokens
SHAPES: dict[str, list[Shape]] = {
    "length": [(256, 4096 // tokens, tokens) for tokens in (128, 256, 512, 1024, 2048, 4096)],
    "one sequence": [(256, 1, tokens) for tokens in (512, 1024, 2048, 4096)],
    "width": [(width, 8, 256) for width in (128, 256, 512, 768)],
    "batch": [(256, sequences, 256) for sequences in (1, 4, 16, 64)],
}


def main() -> None:
    parser = arguments_of("growth", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of the jobs with one and two processes")
    arguments = parser.parse_args()
    peak = matrix_peak()
    rows = []
    for name, shapes in SHAPES.items():
        for shape in shapes:
            rows.append((name, *shape, *measured(shape, arguments.rounds, peak)))
            note(f"{name}, {shape}: done")
    header = ("growing", "width", "sequences", "tokens", "ours, ms", "GPT-2, ms", "ratio", "least", "most",
              "share of peak", "MB", "GPT-2's MB")  # fmt: skip
    print_table(f"peak {peak / 1e9:.0f} GFLOP/s", header, rows)
    processes = two_processes(arguments)
    print_table("triptych pretrain, a thread for each process", ("processes", "tokens/s"), processes)
    save(arguments.json, {"peak": peak, "header": header, "rows": rows, "processes": processes})


def measured(shape: Shape, rounds: int, peak: float) -> tuple[float, ...]:
    """Milliseconds and megabytes of ours and of the peer."""
    answers = in_turn({ours: Worker(partial(prepare, shape, ours)) for ours in (True, False)}, rounds)
    own, theirs = (statistics.median(answer[ours]["seconds"] for answer in answers) for ours in (True, False))
    ratios = [answer[False]["seconds"] / answer[True]["seconds"] for answer in answers]
    width, sequences, tokens = shape
    work = sequences * count_flops(resolve(our_config(width, tokens)), VOCABULARY, 0, tokens, tokens).training
    memory = (answers[-1][ours]["memory"] for ours in (True, False))
    return (1e3 * own, 1e3 * theirs, theirs / own, min(ratios), max(ratios), work / own / peak, *memory)


def our_config(width: int, tokens: int) -> ModelConfig:
    return ModelConfig(family="decoder", width=width, layers=BLOCKS, head_width=64, max_positions=max(512, tokens))


def prepare(shape: Shape, ours: bool) -> Callable[[], Step]:
    import transformers as t

    _ = t.GPT2LMHeadModel  # it is imported when it is named
    width, sequences, tokens = shape
    torch.manual_seed(0)
    ids_BT = torch.randint(200, VOCABULARY, (sequences, tokens + 1))
    inputs_BT, targets_BT = ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
    batch = Batch(
        source_BS=None, source_real_BS=None, inputs_BT=inputs_BT, inputs_real_BT=None, targets_BT=targets_BT,
        prefix_B=None, tokens=inputs_BT.numel(), samples=sequences, loss_positions=inputs_BT.numel(),
    )  # fmt: skip

    def make() -> Step:
        model: Any
        if ours:
            model = Network(make_model(resolve(our_config(width, tokens)), VOCABULARY))
        else:
            drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config = t.GPT2Config(
                vocab_size=VOCABULARY, n_embd=width, n_layer=BLOCKS, n_head=width // 64,
                n_positions=max(512, tokens), **drops,
            )  # fmt: skip
            model = Loss(t.GPT2LMHeadModel(config), lambda model, batch: hugging_face_loss("GPT-2", model, batch))
        return make_step(model, batch, compiled=False)

    return make


def two_processes(arguments: argparse.Namespace) -> list[tuple[int, float]]:
    """Tokens per second with one process and with two."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for devices in (1, 2):
            run = Path(scratch) / str(devices)
            options = small_job(
                arguments, Path(scratch), model__family="decoder", trainer__devices=devices, run_dir=str(run),
                trainer__max_steps=arguments.steps, trainer__save_every=arguments.steps, trainer__log_every=1,
                trainer__validate_every=arguments.steps, trainer__validation_samples=16,
            )  # fmt: skip
            triptych("pretrain", *typed(options), OMP_NUM_THREADS="1")
            rows = [row for row in Run(run).rows() if "train/loss" in row]
            pairs = pairwise(rows[2:])  # the first warm up
            spans = [(two["tokens"] - one["tokens"]) / (two["seconds"] - one["seconds"]) for one, two in pairs]
            found.append((devices, statistics.median(spans)))
    return found


if __name__ == "__main__":
    main()
