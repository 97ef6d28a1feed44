"""A fine-tuning job: all that follows from its settings and its rows, and where its model starts."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pipeline.bundle import Bundle, Model, make_model
from pipeline.data.batch import collate
from pipeline.data.datamodule import Key, Share, Steps, TokenSteps, spread, train_loader
from pipeline.data.objectives import Example
from pipeline.data.rows import Rows, read_task
from pipeline.data.tasks import TASKS, Documents, Encoder, Kind
from pipeline.errors import UserError
from pipeline.evaluation.predicting import Predictor
from pipeline.evaluation.ranking import Index
from pipeline.model.config import resolve
from pipeline.model.heads import ClassificationHead, Pooling
from pipeline.model.transformer import Transformer
from pipeline.tokenizer import Tokenizer, train
from pipeline.training.config import FinetuneConfig
from pipeline.training.fit import check_devices
from pipeline.training.job import total_steps
from pipeline.training.module import Classifier, Network, Retriever, Training
from pipeline.training.pretraining import has_tokenizer, start_bundle
from pipeline.training.run import Run, rank

EPOCHS = 3  # if no limit is set


# What a classifier or an embedding can look at; the first state of a decoder has not read anything.
POOLINGS = {("encoder", "mean"), ("encoder", "class"), ("encoder", "last"), ("decoder", "mean"), ("decoder", "last")}
MEASURED = 32  # rows computed at a time while measuring, where the settings do not say


@dataclass(frozen=True)
class TaskExamples(Dataset[Example]):
    """The training rows as examples."""

    examples: list[Example]

    def __getitem__(self, key: Key) -> Example:
        return self.examples[key[2]]


@dataclass(frozen=True)
class TaskJob:
    """Everything that a fine-tuning run needs, made from its settings."""

    config: FinetuneConfig
    start: Bundle
    rows: Rows
    encoder: Encoder
    examples: TaskExamples
    steps: Steps | TokenSteps
    share: Share
    total_steps: int

    @property
    def model(self) -> Model:
        return self.start.model

    @property
    def kind(self) -> Kind:
        return TASKS[self.config.task.name].kind

    @property
    def pooling(self) -> Pooling:
        """What the settings say, else the mean of states, but to classify the last of a decoder's."""
        mean = self.kind == "retrieval" or self.model.architecture.family == "encoder"
        return self.config.pooling or ("mean" if mean else "last")

    @property
    def predictor(self) -> Predictor:
        batch_size = self.config.data.micro_batch_size or MEASURED
        return Predictor(self.model, self.encoder, self.pooling, self.config.generation, batch_size)

    def training(self) -> Training:
        """The LightningModule."""
        config, smoothing = self.config, self.config.task.label_smoothing
        network = Network(self.model, smoothing)
        unused: tuple[str, ...] = ()
        if self.kind == "classification":
            network, unused = Classifier(self.model, self.pooling, smoothing, self.class_weights()), ("head.",)
        elif self.kind == "retrieval":
            network, unused = Retriever(self.model, self.pooling, config.task.temperature), ("head.",)
            if self.model.architecture.family == "encoder-decoder":
                unused = ("head.", "decoder.")
        for name, parameter in self.model.named_parameters():
            idle = name.startswith(unused) and parameter is not self.model.embedding.weight
            if idle or (config.freeze and not name.startswith("classifier")):
                parameter.requires_grad_(False)
        lengths = [int((example.targets >= 0).sum()) for example in self.examples.examples[:100]]
        return Training(
            network,
            config.optim,
            replace(config.trainer, keep=max(config.trainer.keep, config.average)),
            seed=config.seed,
            total_steps=self.total_steps,
            accumulation=self.share.accumulation(self.steps.batch_size),
            micro_batch=self.share.micro_batch,
            positions=max(1, int(np.mean(lengths))) * 32,
        )

    def class_weights(self) -> torch.Tensor | None:
        """Weights with which all classes count the same, if they should."""
        if not self.config.task.class_weights:
            return None
        counts = Counter(row.label for row in self.rows.train)
        sizes = torch.tensor([float(counts[label]) for label in self.encoder.labels]).clamp(min=1)
        return sizes.sum() / (len(sizes) * sizes)

    def loader(self, start: int) -> DataLoader[Example]:
        """Micro-batches of this process from a step on."""
        span, pad = range(start, self.total_steps), self.start.tokenizer.pad
        return train_loader(self.examples, self.steps, self.share, span, pad, self.config.data.loader_workers)

    def validate(self, module: Training) -> dict[str, float]:
        """Loss and metrics on validation rows, spread evenly; every row once over all processes."""
        chosen = spread(len(self.rows.validation), self.config.trainer.validation_samples)
        rows = [self.rows.validation[number] for number in chosen]
        rank, processes, size = self.share.rank, self.share.processes, self.predictor.batch_size
        pad = self.start.tokenizer.pad
        sums = np.zeros(2)
        module.network.eval()
        with torch.no_grad(), module.trainer.precision_plugin.forward_context():
            for start in range(rank * size, len(rows), processes * size):  # the same batches, whoever computes them
                batch = collate([self.encoder.example(row) for row in rows[start : start + size]], pad)
                losses_P = module.network(batch.to(module.device), each=True)
                sums += (float(losses_P.cpu().double().sum()), len(losses_P))
            own = self.predictor.predict(rows[rank::processes], self.index(rows[0].documents))
            predictions = gathered(own, self.share)
        module.network.train()
        loss, count = module.over_all_processes(sums)
        score = self.predictor.score(rows, predictions)
        return {"val/loss": loss / max(count, 1)} | {f"val/{key}": value for key, value in score.metrics.items()}

    def index(self, documents: Documents | None) -> Index | None:
        """Documents embedded by all processes together, each a part of them."""
        if documents is None:
            return None
        texts = list(documents.texts.values())[self.share.rank :: self.share.processes]
        return Index(documents, np.stack(gathered(list(self.predictor.embed(texts)), self.share)))


def gathered(own: list[Any], share: Share) -> list[Any]:
    """What all processes predicted, in the order of the rows."""
    if share.processes == 1:
        return own
    parts: list[Any] = [None] * share.processes
    torch.distributed.all_gather_object(parts, own)
    whole: list[Any] = [None] * sum(map(len, parts))
    for number, part in enumerate(parts):
        whole[number :: share.processes] = part
    return whole


def make_job(config: FinetuneConfig, run: Run) -> TaskJob:
    """Make everything that a run needs; mistakes show here, before anything is trained."""
    check_devices(config.trainer)
    if config.init_from is None:
        check_family(config, config.model.family)  # before anything is read
    rows = read_task(config.task, config.data, config.seed)
    data = config.data
    start = starting_point(config, rows, run)
    architecture = start.model.architecture
    check_family(config, architecture.family)
    labels = rows.labels
    if labels:
        torch.manual_seed(config.seed)
        start.model.classifier = ClassificationHead(architecture.width, len(labels), config.head_dropout)
    start.model.train()
    encoder = Encoder(config.task, architecture, start.tokenizer, labels, *lengths_within(config, start))
    examples = [encoder.example(row) for row in rows.train]
    steps: Steps | TokenSteps = Steps(len(examples), data.batch_size, config.seed)
    if data.batch_tokens:
        sizes = np.array([[len(ids) for ids in (one.source, one.inputs) if ids is not None] for one in examples])
        steps = TokenSteps(sizes, data.batch_tokens, config.seed)
    elif data.batch_size > len(examples):
        raise UserError(f"data.batch_size: {data.batch_size}, but there are only {len(examples)} training rows")
    own = -(-data.batch_size // config.trainer.processes)
    micro = 0 if data.batch_tokens else min(data.micro_batch_size or own, own)
    trainer = config.trainer
    if (trainer.max_steps, trainer.max_epochs, trainer.max_tokens) == (None, None, None):
        trainer = replace(trainer, max_epochs=EPOCHS)
    total = total_steps(trainer, steps.per_epoch, sum(example.tokens for example in examples))
    share = Share(rank(trainer.devices), trainer.processes, micro)
    if run.material.get("rows", rows.fingerprint) != rows.fingerprint:
        raise UserError(f"{run.path}: was started with other rows; restore them or choose another --run_dir")
    if rank() == 0:
        run.add_material({"steps": total, "rows": rows.fingerprint})
    return TaskJob(config, start, rows, encoder, TaskExamples(examples), steps, share, total)


def check_family(config: FinetuneConfig, family: str) -> None:
    """Refuse what a family cannot do, and pooling that would look at nothing."""
    task = TASKS[config.task.name]
    if family not in task.families:
        can = " or ".join(task.families)
        raise UserError(f"task.name: a model of family {family} cannot do {config.task.name}; use {can}")
    of_states = "encoder" if task.kind == "retrieval" and family == "encoder-decoder" else family
    if config.pooling and (of_states, config.pooling) not in POOLINGS:
        raise UserError(f"pooling: {config.pooling} of a model of family {family} would not see the text; leave it out")


def lengths_within(config: FinetuneConfig, start: Bundle) -> tuple[int, int]:
    """The most tokens of a source and a target: what is asked for, if the model has so many positions."""
    source, target, model = config.data.sequence_length, config.data.target_length, start.model.architecture
    written = max(target, config.generation.max_new_tokens) if TASKS[config.task.name].kind == "text" else 0
    needed = source + written + 3 if model.family == "decoder" else max(source + 2, written + 2)
    if model.longest is not None and needed > model.longest:
        raise UserError(
            f"data.sequence_length: {source} and a target of {written} need {needed} positions, but the model has "
            f"{model.longest}; shorten them"
        )
    return source, target


def starting_point(config: FinetuneConfig, rows: Rows, run: Run) -> Bundle:
    """The model and the tokenizer to start from: a bundle, two halves, or new ones."""
    if config.init_from is None:
        tokenizer = own_tokenizer(config, rows, run)
        torch.manual_seed(config.seed)
        return Bundle(make_model(resolve(config.model), tokenizer.vocab_size), tokenizer)
    bundle = start_bundle(config.init_from, config.model)
    if config.data.tokenizer and Tokenizer.load(config.data.tokenizer).fingerprint != bundle.tokenizer.fingerprint:
        raise UserError(f"data.tokenizer: not the tokenizer of {config.init_from}; leave it out")
    family = bundle.model.architecture.family
    if TASKS[config.task.name].kind == "text" and family == "encoder":
        torch.manual_seed(config.seed)
        second = start_bundle(config.init_decoder_from, config.model) if config.init_decoder_from else bundle
        return Bundle(warm_start(bundle, second), bundle.tokenizer, bundle.meta)
    if config.init_decoder_from:
        raise UserError(f"init_decoder_from: {config.init_from} is of family {family}; only an encoder takes a decoder")
    return bundle


def own_tokenizer(config: FinetuneConfig, rows: Rows, run: Run) -> Tokenizer:
    """The tokenizer that is named, or one trained on the training rows for this run."""
    if config.data.tokenizer:
        return Tokenizer.load(config.data.tokenizer)
    folder = run.path / "tokenizer"
    if rank() == 0 and not has_tokenizer(run, rows.fingerprint, config.data.new_tokenizer):
        train(rows.texts(), config.data.new_tokenizer, rows.fingerprint).save(folder)
    while not (folder / "meta.json").is_file():
        time.sleep(0.2)
    return Tokenizer.load(folder)


def warm_start(first: Bundle, second: Bundle) -> Model:
    """An encoder-decoder of two pretrained halves; cross-attention, which neither has, starts anew."""
    if first.tokenizer.fingerprint != second.tokenizer.fingerprint:
        raise UserError(
            f"init_decoder_from: its tokenizer {second.tokenizer.fingerprint[:16]} is not that of init_from, "
            f"{first.tokenizer.fingerprint[:16]}; pretrain both with one tokenizer"
        )
    one = first.model.architecture
    other = replace(second.model.architecture, prefix_attention=one.prefix_attention)  # a target is read as it comes
    if other.family == "encoder-decoder":
        raise UserError("init_decoder_from: takes an encoder or a decoder; name an encoder-decoder in init_from")
    layers = other.decoder_layers or other.encoder_layers
    settings = replace(one, family="encoder-decoder", decoder_layers=layers)
    if replace(other, family="encoder-decoder", encoder_layers=one.encoder_layers, decoder_layers=layers) != settings:
        raise UserError("init_decoder_from: the two models differ in more than their family; use one preset and size")
    model = make_model(settings, first.model.vocab_size)
    assert isinstance(model, Transformer) and model.decoder is not None
    weights = model.state_dict()
    taken = {name: tensor for name, tensor in first.model.state_dict().items() if not name.startswith("classifier")}
    side = "decoder" if other.decoder_layers else "encoder"
    for name, tensor in second.model.state_dict().items():
        inside = "decoder." + name.removeprefix(f"{side}.")
        two_way = side == "encoder" and one.position == "t5" and inside.startswith("decoder.positions.")
        if name.startswith(f"{side}.") and inside in weights and not two_way:  # a decoder has buckets of the past alone
            taken[inside] = tensor
    model.load_state_dict(weights | taken)
    fresh = set(weights) - set(taken)
    new = (".cross.", "decoder.positions.") if one.position == "t5" else (".cross.",)
    assert fresh and all(any(part in name for part in new) for name in fresh), "more was not taken over than is new"
    return model
