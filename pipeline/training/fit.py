"""Lightning's Trainer around a module, from the newest checkpoint to the end, a signal, or an error in one line."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from pipeline.errors import Stopped, UserError, is_out_of_memory
from pipeline.model.fast import keep_freed_memory
from pipeline.terminal import note
from pipeline.training import checkpoint
from pipeline.training.callbacks import Keeper, requeued
from pipeline.training.config import TrainerConfig
from pipeline.training.module import Progress, Retriever, Training
from pipeline.training.run import rank


def fit(module: Training, loader: Callable[[int], DataLoader[Any]], keeper: Keeper) -> dict[str, float]:
    """Train to the end and return what the last validation found; `loader` makes the batches from a step on."""
    run = keeper.run
    found = checkpoint.newest(run.path)
    start, state = (found[0].step, found[1]) if found else (0, None)
    if rank() == 0:
        run.cut_back(start)
        if start:
            note(f"going on from step {start:,}")
    if state and state["progress"]["ended"]:  # it was killed between its last step and its bundle
        module.model.load_state_dict(state["model"])
        module.progress = Progress(**state["progress"])
        return run.last_measured()
    if start >= module.total_steps:
        raise UserError(
            f"trainer.max_steps: the run is at step {start:,} and is to end at {module.total_steps:,}; allow more, or "
            f"make a bundle of what there is: triptych bundle {run.path}"
        )
    keeper.state = state
    trainer = make_trainer(module, keeper)
    with one_line_memory_errors(module):
        trainer.fit(module, loader(start))
    if not module.progress.ended:  # it was told to stop, and was saved; one process speaks for all
        if rank() == 0:
            note(f"stopped and saved; go on with: triptych {run.stage} --resume {run.path}")
        raise Stopped(requeued=rank() != 0 or requeued(keeper.stopped_by))
    return keeper.measured


def make_trainer(module: Training, keeper: Keeper) -> pl.Trainer:
    """Lightning's Trainer with what is ours to decide decided."""
    settings = module.settings
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what it has to say we have said in a line
    warnings.filterwarnings("ignore", module="pytorch_lightning|torch.distributed")
    torch.set_flush_denormal(True)  # tiny gradients would slow the loss several times
    keep_freed_memory()
    strategy: Any = settings.strategy
    if strategy == "fsdp":
        from pytorch_lightning.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=settings.processes, tensor_parallel_size=1)
    elif strategy == "auto" and settings.processes > 1:
        strategy = "ddp"
    try:
        return pl.Trainer(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=strategy,
            precision="32-true" if settings.precision == "32" else settings.precision,
            max_epochs=1,
            accumulate_grad_batches=module.accumulation,
            callbacks=[keeper],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **settings.extra,
        )
    except Exception as error:  # whatever Lightning makes of the settings
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error


def check_devices(trainer: TrainerConfig) -> None:
    """Refuse more devices than there are."""
    gpus = torch.cuda.device_count()
    on_gpu = trainer.accelerator == "gpu" or (trainer.accelerator == "auto" and gpus > 0)
    if trainer.accelerator == "mps":
        available, kind = 1, "such device"
    else:
        available, kind = (gpus, "GPUs") if on_gpu else (torch.multiprocessing.cpu_count(), "cores")
    if trainer.devices > available:
        raise UserError(f"trainer.devices: {trainer.devices}, but this machine has {available} {kind}")


@contextmanager
def one_line_memory_errors(module: Training) -> Iterator[None]:
    """Say in one line what to change when memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if not module.micro_batch:
            raise UserError("out of memory; start again with half of data.batch_tokens") from error
        less = f"--data.micro_batch_size {module.micro_batch // 2}" if module.micro_batch > 1 else "--trainer.recompute"
        retrieval = isinstance(module.network, Retriever)  # its negatives are the others of a micro-batch
        how = "start again in another folder with" if retrieval and module.micro_batch > 1 else "go on with"
        raise UserError(f"out of memory with {module.micro_batch} samples at a time; {how} {less}") from error
