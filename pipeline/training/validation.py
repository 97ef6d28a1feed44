"""What is measured while pretraining: pinned losses, bits per byte, the gap to the training text, samples."""

import math
from dataclasses import replace

import numpy as np
import torch

from pipeline.data.config import ObjectiveConfig, Split
from pipeline.data.datamodule import HeldOut
from pipeline.data.objectives import IGNORED, current
from pipeline.evaluation.attention_maps import attention_maps
from pipeline.terminal import warn
from pipeline.training.job import Job
from pipeline.training.module import Training
from pipeline.training.run import Run
from pipeline.training.samples import write_samples
from pipeline.training.tracking import Tracker

SHOWN_TOKENS = 24  # of an attention map
COPIED = 0.5  # of what a model writes; more is learnt by heart


def validate(job: Job, module: Training) -> dict[str, float]:
    """The loss at pinned masks, bits per byte where they exist, and how much better the training text is known."""
    objective = current(job.examples.objective, 1.0)
    metrics: dict[str, float] = {}
    if objective.name == "hybrid":
        metrics["val/masked_loss"] = measure(job, module, "validation", replace(objective, name="masked"))["val/loss"]
        objective = replace(objective, name="causal")
    metrics |= measure(job, module, "validation", objective)
    metrics["val/gap"] = metrics["val/loss"] - measure(job, module, "train", objective)["val/loss"]
    return metrics


def measure(job: Job, module: Training, split: Split, objective: ObjectiveConfig) -> dict[str, float]:
    """Measure on a split with one objective, every example once over all processes."""
    examples = job.held_out(split, objective)
    token_bytes = torch.from_numpy(job.tokenizer.token_bytes())
    ordinary = torch.from_numpy(examples.vocabulary.is_ordinary)
    sums = np.zeros(6)  # loss, positions; nats and bytes of ordinary tokens; the same of second halves
    network = module.network
    network.eval()
    with torch.no_grad(), module.trainer.precision_plugin.forward_context():
        for batch in examples.batches(job.share, job.tokenizer.pad):
            wanted_BT = batch.targets_BT != IGNORED
            targets_P = batch.targets_BT[wanted_BT]
            halves_B = wanted_BT.sum(1) // 2 if objective.name == "causal" else torch.zeros(len(wanted_BT))
            row_P, place_P = wanted_BT.nonzero(as_tuple=True)
            late_P = place_P >= halves_B[row_P]
            losses_P = network(batch.to(module.device), each=True).cpu().double()
            text_P, bytes_P = ordinary[targets_P], token_bytes[targets_P]
            sums += (
                losses_P.sum().item(), len(losses_P), losses_P[text_P].sum().item(), bytes_P.sum().item(),
                losses_P[text_P & late_P].sum().item(), bytes_P[late_P].sum().item(),
            )  # fmt: skip
    network.train()
    loss, count, nats, size, late_nats, late_size = module.over_all_processes(sums)
    metrics = {"val/loss": loss / max(count, 1)}
    if objective.name in ("causal", "prefix"):
        metrics["val/bits_per_byte"] = nats / math.log(2) / max(size, 1)
        metrics["val/continuation_bits_per_byte"] = late_nats / math.log(2) / max(late_size, 1)
    return metrics


def take_samples(job: Job, module: Training, run: Run, tracker: Tracker) -> dict[str, float]:
    """Write what the model makes of held-out text, to a file and to the tracker; warn when it only copies."""
    step, examples = module.progress.step, shown_examples(job)
    metrics = write_samples(module.model, job.tokenizer, examples, job.grams, run, step, tracker)
    if metrics.get("val/copy_rate", 0) > COPIED:
        warn(f"step {step:,}: {metrics['val/copy_rate']:.0%} of what the model writes is copied from its training text")
    return metrics


def show_attention(job: Job, module: Training, run: Run, tracker: Tracker) -> dict[str, float]:
    """Draw where the model looks in the beginning of a held-out text."""
    examples, step = shown_examples(job), module.progress.step
    example = examples.example(examples.numbers[0])
    source, target = (None if ids is None else ids[:SHOWN_TOKENS].tolist() for ids in (example.source, example.inputs))
    folder = run.path / "samples" / f"attention-{step:08}"
    prefix = min(example.prefix, SHOWN_TOKENS)
    for path in attention_maps(module.model, job.tokenizer, source, target, folder, prefix=prefix):
        tracker.image(f"attention/{path.stem}", path, step)
    return {}


def shown_examples(job: Job) -> HeldOut:
    objective = current(job.examples.objective, 1.0)
    return job.held_out("validation", replace(objective, name="causal") if objective.name == "hybrid" else objective)
