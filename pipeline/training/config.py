"""What can be set about a training job. Light: imported by the command line, never torch."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.config import GenerationConfig
from pipeline.data.config import BatchConfig, CorpusConfig, ObjectiveConfig, TaskConfig, TaskDataConfig, check_objective
from pipeline.errors import UserError
from pipeline.model.config import Architecture, ModelConfig, resolve

Precision = Literal["32", "bf16-mixed", "16-mixed"]
# Arguments of Lightning's that end a run before we save it.
ENDINGS = {"fast_dev_run", "limit_train_batches", "max_steps", "max_time", "overfit_batches"}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How weights are updated."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the matrices of the blocks and AdamW for the rest."""
    lr: float | None = None
    """The highest learning rate; by default 0.001 with AdamW, and 0.01 for what Muon leaves to it."""
    muon_lr: float = 0.02
    """The highest learning rate of Muon's matrices."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors (norms, biases) are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    epsilon: float = 1e-8
    """AdamW's term against division by zero."""
    schedule: Literal["cosine", "linear", "inverse_sqrt", "stable", "constant"] = "cosine"
    """What follows the warm-up; stable keeps the rate and falls only in the last part of the run."""
    warmup_steps: int = 100
    """Steps in which the rate grows to its highest; at most half of the run."""
    final_share: float = 0.1
    """The rate at the end of a falling schedule, as a share of the highest."""
    decay_share: float = 0.2
    """The last part of a stable schedule, in which the rate falls."""
    layer_decay: float = 1.0
    """Each block learns at this share of the rate of the block above it; 1 is all at the same."""
    clip: float = 1.0
    """Gradients longer than this are shortened to it; 0 is off."""

    def __post_init__(self) -> None:
        if not (self.highest > 0 and self.muon_lr > 0):
            raise UserError("optim.lr and optim.muon_lr: must be above 0")
        if min(self.weight_decay, self.warmup_steps, self.clip, self.epsilon) < 0:
            raise UserError("optim: weight_decay, warmup_steps, clip and epsilon must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas: {list(self.betas)} must be from 0 up to 1")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"optim.layer_decay: {self.layer_decay} must be above 0 and at most 1")
        if not (0 <= self.final_share <= 1 and 0 < self.decay_share <= 1):
            raise UserError("optim.final_share and optim.decay_share: must be shares from 0 to 1")

    @property
    def highest(self) -> float:
        """The highest learning rate of what AdamW updates: embeddings beside Muon's matrices want a higher one."""
        return {"adamw": 1e-3, "muon": 1e-2}[self.name] if self.lr is None else self.lr


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long to train, on what, and how often to look and to save."""

    max_steps: int | None = None
    """Optimizer steps; where no steps, epochs or tokens are set 1000, in fine-tuning 3 epochs."""
    max_epochs: float | None = None
    """Passes over the training text."""
    max_tokens: int | None = None
    """Raw tokens to train on."""
    max_seconds: float | None = None
    """Stop after so many seconds of training at the latest, and make the bundle."""
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    """What to compute on."""
    devices: int = 1
    """Processes on this machine, one a device."""
    num_nodes: int = 1
    """Machines."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes share the work: each with a whole model, or each with a part of it."""
    precision: Precision = "32"
    """Number format of the matrix products; weights stay in 32 bits."""
    compile: bool = False
    """Compile the model first: slower to start, faster afterwards."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, a third more work."""
    log_every: int = 10
    """Steps between rows of metrics."""
    validate_every: int = 200
    """Steps between validations."""
    validation_samples: int = 512
    """Windows of held-out text, or rows of a task, to validate on, spread evenly over all of them; 0 is all."""
    save_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep, beside the best."""
    bad_steps: int = 20
    """Stop after so many steps in a row without a finite gradient."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More arguments for Lightning's Trainer, by name."""

    def __post_init__(self) -> None:
        for name in ("devices", "num_nodes", "log_every", "validate_every", "save_every", "keep", "bad_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"trainer.{name}: {getattr(self, name)} must be at least 1")
        for name in ("max_steps", "max_epochs", "max_tokens", "max_seconds"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise UserError(f"trainer.{name}: {getattr(self, name)} must be above 0")
        if self.validation_samples < 0:
            raise UserError(f"trainer.validation_samples: {self.validation_samples} must not be negative")
        if ends := ENDINGS & self.extra.keys():
            raise UserError(f"trainer.extra: {min(ends)} would end a run unsaved; use trainer.max_steps or max_seconds")

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return self.devices * self.num_nodes


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Weights & Biases: where a run is recorded."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is WANDB_MODE if set, else online with a key (WANDB_API_KEY or `wandb login`), else offline."""
    project: str = "triptych"
    """The project at W&B."""
    entity: str | None = None
    """The team or user at W&B; the key's own by default."""
    group: str | None = None
    """Runs of one group are shown together."""
    name: str | None = None
    """The run's name; made from the family, the size and the stage by default."""
    tags: list[str] = field(default_factory=list)
    """Words to filter runs by."""
    labels: dict[str, str] = field(default_factory=dict)
    """More keys of the run's config, to group runs by."""


@dataclass(frozen=True, kw_only=True)
class PretrainTrackingConfig(TrackingConfig):
    """Weights & Biases: where a run is recorded, and how often it shows what it has learnt."""

    samples_every: int = 500
    """Steps between samples of text; 0 is never."""
    attention_every: int = 0
    """Steps between attention maps; 0 is never."""

    def __post_init__(self) -> None:
        if min(self.samples_every, self.attention_every) < 0:
            raise UserError("tracking.samples_every and tracking.attention_every count steps; 0 is never")


@dataclass(frozen=True, kw_only=True)
class PretrainDataConfig(BatchConfig, CorpusConfig):
    """The text, the tokenizer, and how it is cut into batches."""

    stores: str | None = None
    """Where token stores are kept; by default in the cache folder, shared between runs."""
    sequence_length: int = 256
    """Raw tokens of a window, for every family."""
    within_documents: bool = False
    """Begin a new window with each document instead of running on into the next."""

    def __post_init__(self) -> None:
        CorpusConfig.__post_init__(self)
        BatchConfig.__post_init__(self)
        if self.sequence_length < 2:
            raise UserError("data.sequence_length: a window needs at least 2 tokens")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Pretrain a model on raw text: corpus, tokenizer, store, training, bundle."""

    data: PretrainDataConfig
    """The text and its batches."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What the model learns to predict."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How weights are updated."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long, on what, how often."""
    tracking: PretrainTrackingConfig = field(default_factory=PretrainTrackingConfig)
    """Weights & Biases."""
    seed: int = 1
    """Decides first weights, order of the data, masks and dropout."""
    run_dir: str | None = None
    """The folder of this run; by default one below runs/ named by the settings."""
    init_from: str | None = None
    """Start from the weights and the tokenizer of a bundle (or of a model of transformers) of the same family."""
    resume: str | None = None
    """Go on with the run in this folder; nothing else is needed."""
    dry_run: bool = False
    """Print the plan, try one step and one validation batch, and keep only the token store."""

    def __post_init__(self) -> None:
        check_objective(self.objective, self.model.family)
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed: {self.seed} must be from 0 to 2**63 - 1")
        if self.trainer.strategy == "fsdp" and self.optim.name == "muon":
            raise UserError("optim.name: muon needs whole matrices, which fsdp cuts into parts; use ddp or adamw")
        if self.model.family == "recurrent" and self.tracking.attention_every:
            raise UserError("tracking.attention_every: a recurrent model does not attend in pretraining; leave it at 0")
        if self.init_from is None:
            check_positions(resolve(self.model), self.data.sequence_length)


def check_positions(model: Architecture, tokens: int) -> None:
    """Refuse windows that are longer than the model."""
    if model.longest is not None and tokens + 1 > model.longest:
        raise UserError(
            f"data.sequence_length: {tokens} and a begin token are more than the model's {model.longest} positions; "
            "raise model.max_positions or shorten the sequence"
        )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tune a model on a task: from a bundle, from a model of transformers, or from scratch."""

    task: TaskConfig
    """What is to be learnt."""
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    """The rows and their batches."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model, if it starts from scratch."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """How answers are written, for text-to-text tasks."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How weights are updated."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long, on what, how often."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Weights & Biases."""
    pooling: Literal["mean", "class", "last"] | None = None
    """What a classifier or an embedding looks at; by default the mean of states, but to classify a decoder's last."""
    head_dropout: float = 0.1
    """Dropout before the classifier."""
    freeze: bool = False
    """Train the classifier alone."""
    patience: int = 0
    """Stop after so many validations without a better one; 0 is never."""
    average: int = 1
    """Hand on the mean of the weights of so many last checkpoints; 1 hands on the best."""
    seed: int = 1
    """Decides first weights, order of the data and dropout."""
    seeds: int = 1
    """Run so many seeds from `seed` on, each in a folder beside run_dir, and print the mean and deviation of scores."""
    run_dir: str | None = None
    """The folder of this run; by default one below runs/ named by the settings."""
    init_from: str | None = None
    """Start from a bundle, a folder of transformers, or hf:NAME; an encoder becomes that of a text-to-text task."""
    init_decoder_from: str | None = None
    """Take the decoder of a text-to-text task from this bundle."""
    resume: str | None = None
    """Go on with the run in this folder; nothing else is needed."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed: {self.seed} must be from 0 to 2**63 - 1")
        if self.patience < 0 or min(self.average, self.seeds) < 1 or not 0 <= self.head_dropout < 1:
            raise UserError("patience, average, seeds, head_dropout: at least 0, 1, 1, and from 0 up to 1")
        if self.seeds > 1 and self.resume:
            raise UserError("seeds: the same command again goes on with all of them; resume goes on with one run")
        if self.generation.temperature:
            raise UserError("generation.temperature: a task is judged by the most probable answers; leave it at 0")
        if self.freeze and self.task.name not in ("sentiment", "classification"):
            raise UserError("freeze: only classification has a head that can be trained alone")
        if self.init_decoder_from and not self.init_from:
            raise UserError("init_decoder_from: is the second half of a warm start; name the first with init_from")
        if self.data.batch_tokens and self.task.name == "retrieval":
            raise UserError("data.batch_tokens: retrieval takes its negatives from a batch; give it a batch_size")
        own = -(-self.data.batch_size // self.trainer.processes)
        if self.task.name == "retrieval" and min(own, self.data.micro_batch_size or own) < 2:
            raise UserError("data.batch_size: retrieval needs 2 rows or more on a device, its negatives are the others")
        if self.trainer.strategy == "fsdp":
            raise UserError("trainer.strategy: fine-tuning works with ddp; fsdp is for pretraining")


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """List runs: their state, step, best metric, and how to go on with each."""

    folder: str
    """A folder with runs in it, or one run."""


@dataclass(frozen=True, kw_only=True)
class RunBundleConfig:
    """Make a bundle of any checkpoint of a run, also while it goes on."""

    run: str
    """The folder of a run."""
    step: int | None = None
    """The step of the checkpoint; the newest by default."""
    output: str | None = None
    """Where the bundle goes; by default into the run's folder."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Upload runs that were tracked offline, with their lineage."""

    folders: list[str]
    """Folders of runs or studies."""
