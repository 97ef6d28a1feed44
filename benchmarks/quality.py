"""How long it takes to be as good on held-out novels as transformers' recipe is after some minutes.

    python -m benchmarks.quality --data NOVELS --family decoder --minutes 15

Peers: GPT-2, BERT or T5 of transformers in the shape of benchmarks/training.py, AdamW, a linear schedule over the
minutes, no dropout, compiled if that is faster, at the best learning rate of three, each tried for `--tune` minutes,
and of more while the best is the lowest or the highest. Ours: `triptych pretrain` with `modern` and Muon, a cosine over
0.4 times as many steps as the peer did, nothing tuned. Same tokenizer, windows, order, masks and held-out books; one
after the other on the whole machine. The clock of ours runs while it validates and saves, the peer's neither then nor
while it compiles.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import arguments_of, save, small_job, triptych, typed
from benchmarks.training import hugging_face
from pipeline.configuration import build
from pipeline.data.batch import Batch
from pipeline.data.objectives import IGNORED
from pipeline.terminal import note, print_table
from pipeline.training.config import PretrainConfig
from pipeline.training.job import Job
from pipeline.training.pretraining import make_job
from pipeline.training.run import Run, opened
from pipeline.training.validation import validate

PEERS = {"encoder": "BERT", "decoder": "GPT-2", "encoder-decoder": "T5"}
OBJECTIVES = {"encoder": "masked", "decoder": "causal", "encoder-decoder": "span"}
RATES = (1e-3, 2e-3, 4e-3)
MOST_RATES = 7
WARMUP = 0.05  # of the peer's minutes
SHARE = 0.4  # of the peer's steps


class Peer(nn.Module):
    """A model of transformers that takes our batches, with the loss of each position that has one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model: Any = hugging_face(kind, 0.0).model

    def forward(self, batch: Batch, each: bool = False) -> Tensor:
        if batch.source_BS is None:
            found = self.model(input_ids=batch.inputs_BT)
        elif batch.inputs_BT is None:
            found = self.model(input_ids=batch.source_BS, attention_mask=batch.source_real_BS)
        else:
            found = self.model(
                input_ids=batch.source_BS, attention_mask=batch.source_real_BS, decoder_input_ids=batch.inputs_BT
            )
        wanted_BT = batch.targets_BT != IGNORED
        logits_PV, targets_P = found.logits[wanted_BT], batch.targets_BT[wanted_BT]
        return nn.functional.cross_entropy(logits_PV, targets_P, reduction="none" if each else "mean")


def main() -> None:
    parser = arguments_of("quality", __doc__)
    parser.add_argument("--family", choices=PEERS, default="decoder")
    parser.add_argument("--minutes", type=float, default=15, help="of the peer")
    parser.add_argument("--tune", type=float, default=1.5, help="minutes for each learning rate of the peer")
    parser.add_argument("--steps", type=int, help="of ours")
    parser.add_argument("--options", nargs="*", default=[], help="more settings of ours")
    arguments = parser.parse_args()
    family, peer = arguments.family, PEERS[arguments.family]
    with tempfile.TemporaryDirectory() as scratch:
        ours = small_job(
            arguments, Path(scratch), model__family=family, objective__name=OBJECTIVES[family], optim__name="muon",
            optim__warmup_steps=20, optim__final_share=0, trainer__validation_samples=96,
        )  # fmt: skip
        ours |= dict(option.split("=", 1) for option in arguments.options)
        longest = {"trainer.max_steps": "1000000", "run_dir": f"{scratch}/peer"}  # the clock stops the peer
        config = build(PretrainConfig, [], ours | longest)
        with opened(config, "peer") as run:
            job = make_job(config, run)  # its tokenizer and its store are what `triptych` goes on with
            short, long = 60 * arguments.tune, 60 * arguments.minutes
            done = {form: train_peer(job, peer, RATES[0], short / 4, form)[-1]["step"] for form in (False, True)}
            compiled = done[True] > done[False]
            tried = tune(lambda rate: train_peer(job, peer, rate, short, compiled)[-1]["val/loss"])
            rate = best(tried)
            theirs = train_peer(job, peer, rate, long, compiled)
        steps = arguments.steps or max(1, round(SHARE * theirs[-1]["step"]))
        ours |= {"run_dir": f"{scratch}/ours", "data.tokenizer": f"{scratch}/peer/tokenizer"}
        ours |= {"trainer.max_steps": str(steps), "trainer.save_every": str(steps)}
        ours["trainer.validate_every"] = str(max(1, steps // 8))
        triptych("pretrain", *typed(ours))
        rows = [row for row in Run(Path(scratch) / "ours").rows() if "val/loss" in row]
    report(arguments, f"{peer}, compiled" if compiled else peer, rate, tried, theirs, rows)


def tune(loss: Callable[[float], float]) -> dict[float, float]:
    """The loss at each learning rate, so that the best one lies between others."""
    tried = {rate: loss(rate) for rate in RATES}
    while len(tried) < MOST_RATES and (rate := best(tried)) in (min(tried), max(tried)):
        beyond = rate / 2 if rate == min(tried) else 2 * rate
        tried[beyond] = loss(beyond)
    return tried


def best(tried: dict[float, float]) -> float:
    return min(tried, key=tried.__getitem__)


def train_peer(job: Job, kind: str, rate: float, seconds: float, compiled: bool) -> list[dict[str, float]]:
    """Train for so many seconds; what was measured at six moments, the last at the end."""
    torch.manual_seed(1)
    torch.set_flush_denormal(True)
    network = Peer(kind).train()
    if compiled:
        network.model.compile()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    taken, tokens = 0.0, 0
    rows: list[dict[str, float]] = []
    for step, batch in enumerate(job.loader(0), 1):
        began = time.perf_counter()
        part = taken / seconds
        for group in optimizer.param_groups:
            group["lr"] = rate * min((part + 0.01) / WARMUP, (1 - part) / (1 - WARMUP))
        network(batch).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        taken += 0 if compiled and step == 1 else time.perf_counter() - began
        tokens += batch.tokens
        if taken >= seconds * (len(rows) + 1) / 6:
            measured = validate(job, stand_in(network))
            rows.append({"step": step, "tokens": tokens, "seconds": taken} | measured)
            note(f"{kind}, rate {rate:g}, {taken:.0f} s, step {step}: val/loss {measured['val/loss']:.4f}")
        if taken >= seconds:
            break
    return rows


def stand_in(network: nn.Module) -> Any:
    """What `validate` asks of a LightningModule."""
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=nullcontext))
    return SimpleNamespace(network=network, device="cpu", trainer=trainer, over_all_processes=list)


def report(
    arguments: argparse.Namespace,
    peer: str,
    rate: float,
    tried: dict[float, float],
    theirs: list[dict[str, float]],
    ours: list[dict[str, float]],
) -> None:
    goal = theirs[-1]["val/loss"]
    reached = next((row for row in ours if row["val/loss"] <= goal), None)
    share = reached["seconds"] / theirs[-1]["seconds"] if reached else None
    header = ("who", "steps", "tokens", "minutes", "val/loss", "bits a byte")
    table = [
        (who, row["step"], row["tokens"], row["seconds"] / 60, row["val/loss"], row.get("val/bits_per_byte"))
        for who, rows in ((f"{peer}, rate {rate:g}", theirs), ("ours", ours))
        for row in rows
    ]
    print_table(f"{arguments.family}: held-out loss over time", header, table)
    note(f"ours is as good after {share:.2f} of the time" if share else "ours did not get as good in these steps")
    found = {"peer": peer, "rate": rate, "tried": {f"{key:g}": loss for key, loss in tried.items()}}
    path = arguments.json.with_stem(f"{arguments.json.stem}-{arguments.family}")
    save(path, found | {"share": share, "theirs": theirs, "ours": ours})


if __name__ == "__main__":
    main()
