"""The plan of a study: what each of its models is and costs under every measure."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.configuration import build
from pipeline.data.config import OBJECTIVES, ObjectiveConfig
from pipeline.errors import UserError
from pipeline.evaluation.config import Rule, StudyConfig, Variant
from pipeline.evaluation.matching import WITHIN, Cost, cost_of, matched, value
from pipeline.files import described, fingerprint, read_json, write_json
from pipeline.model.config import DROPOUTS, ModelConfig, resolve
from pipeline.terminal import warn
from pipeline.tokenizer import Tokenizer, special_tokens
from pipeline.training.config import FinetuneConfig, PretrainConfig

PLAN = "plan.json"
SOLVED = {"model.layers", "model.encoder_layers", "model.decoder_layers", "model.feed_forward"}
HEADER = ("model", "matched by", "objective", "width × blocks", "feed-forward", "block parameters", "ratio",
          "all parameters", "FLOPs a window", "ratio")  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A model of a study, its size solved for."""

    name: str
    model: ModelConfig
    objective: str
    cost: Cost
    match: Rule | None
    against: tuple[str, ...]
    options: dict[str, str]
    """Settings of its first training, beside those of the model."""
    start: str | None = None
    """The model whose pretraining it takes."""
    asked: str = ""
    """The fingerprint of what its size was solved for."""


def plan_candidates(config: StudyConfig) -> dict[str, Candidate]:
    """Solve for the size of every model; what was solved once is read back."""
    path = Path(config.run_dir) / PLAN
    with described(path, "delete it; it is made again"):
        told = read_json(path) if path.is_file() else {}
        recorded = {name: {"asked": one["asked"], "model": dict(one["model"])} for name, one in told.items()}
    asked = config.models()
    found: dict[str, Candidate] = {}
    vocab_size = vocabulary_size(read_base(config, {}))
    for name, variant in sorted(asked.items(), key=lambda pair: pair[1].start is not None):
        if variant.start:
            found[name] = warm(name, variant, found[variant.start], vocab_size)
        else:
            found[name] = solved(name, variant, config, vocab_size, recorded.get(name, {}))
    return {name: found[name] for name in asked}


def write_plan(folder: Path, candidates: dict[str, Candidate]) -> None:
    """Write down what was solved, for those who go on with the study."""
    solved = {name: {"asked": one.asked, "model": asdict(one.model)} for name, one in candidates.items() if one.asked}
    write_json(folder / PLAN, solved)


def read_base(config: StudyConfig, options: dict[str, str]) -> PretrainConfig:
    """The settings of pretraining, of which a study without one only takes what a model is by default."""
    given = {"model.size": config.size} | config.pretrain_options
    if not config.pretrain:
        given |= {"data.corpus": "[planned]"}
        given |= {key: word for key, word in config.task_options.items() if key.startswith("model.")}
    given |= {key: word for key, word in options.items() if key.startswith(("model.", "objective."))}
    return read_settings("pretrain", tuple(config.pretrain), tuple(given.items()))


@cache
def read_settings(stage: str, files: tuple[str, ...], options: tuple[tuple[str, str], ...]) -> Any:
    """The settings of a job, once read: it is what takes longest."""
    config_class: type[Any] = PretrainConfig if stage == "pretrain" else FinetuneConfig
    return build(config_class, map(Path, files), dict(options))


def vocabulary_size(base: PretrainConfig) -> int:
    """How many tokens there are, or may be at most where a tokenizer is still to be trained."""
    new = base.data.new_tokenizer
    if base.data.tokenizer:
        return Tokenizer.load(base.data.tokenizer).vocab_size
    return 256 + len(special_tokens(new)) if new.kind == "byte" else new.vocab_size


def solved(name: str, variant: Variant, config: StudyConfig, vocab_size: int, recorded: dict[str, Any]) -> Candidate:
    """A model that is trained from the beginning."""
    base = read_base(config, variant.options)
    reference = read_base(config, {key: word for key, word in variant.options.items() if key == "model.size"}).model
    model, window = base.model, base.data.sequence_length
    objective = replace(base.objective, name=base.objective.name or OBJECTIVES[model.family][0])
    asked = fingerprint([asdict(model), asdict(reference), asdict(objective), variant.match, window, vocab_size])
    if variant.match and model.family == "recurrent":
        raise UserError(f"variants: {name} is recurrent, which cannot be matched; leave out its match")
    if variant.match in ("parameters", "flops") and (own := SOLVED & variant.options.keys()):
        raise UserError(f"variants: {name}: match solves for {min(own)}; leave one of them out")
    if recorded.get("asked") == asked:
        model = ModelConfig(**recorded["model"])
    elif variant.match:
        model = matched(model, reference, variant.match, vocab_size, window, objective)
    cost = cost_of(resolve(model), vocab_size, window, objective)
    words = " then ".join(objective.schedule) or str(objective.name)
    rest = {key: word for key, word in variant.options.items() if not key.startswith("model.")}
    return Candidate(name, model, words, cost, variant.match, variant.against, rest, asked=asked)


def warm(name: str, variant: Variant, start: Candidate, vocab_size: int) -> Candidate:
    """A model that takes the pretraining of another, at its cost; it is not matched."""
    model = start.model
    family = variant.options.get("model.family", model.family)
    if (model.family, family) == ("encoder", "encoder-decoder"):  # its blocks make both sides
        blocks = resolve(model).encoder_layers
        model = replace(model, family="encoder-decoder", layers=None, encoder_layers=blocks, decoder_layers=blocks)
    elif family != model.family:
        raise UserError(f"variants: {name}: a model of family {family} cannot start from {start.name}")
    cost = replace(cost_of(resolve(model), vocab_size, 2, ObjectiveConfig()), flops=start.cost.flops)
    rest = {key: word for key, word in variant.options.items() if key != "model.family"}
    if fixed := [key for key in rest if key.startswith("model.") and key.removeprefix("model.") not in DROPOUTS]:
        raise UserError(f"variants: {name} is the model of {start.name}, its start; leave out {fixed[0]}")
    return Candidate(name, model, start.objective, cost, None, variant.against, rest, start=start.name)


def plan_rows(candidates: dict[str, Candidate], pretrained: bool) -> tuple[list[str], list[tuple[object, ...]]]:
    """The table of the plan; without pretraining there are no windows, and tokenizers are not known before."""
    reference = (candidates.get("decoder") or next(iter(candidates.values()))).cost  # what ratios are of
    rows: list[tuple[object, ...]] = []
    for one in candidates.values():
        model, cost = resolve(one.model), one.cost
        blocks = "+".join(str(count) for count in (model.encoder_layers, model.decoder_layers) if count)
        shape = (f"{model.width} × {blocks}", "-" if model.family == "recurrent" else model.feed_forward)
        relative = f"{cost.parameters / reference.parameters:.3f}"
        row: tuple[object, ...] = (one.name, one.match or "-", one.objective, *shape, cost.parameters, relative)
        rows.append((*row, cost.all_parameters, f"{cost.flops:.3g}", f"{cost.flops / reference.flops:.3f}"))
    kept = [place for place in range(len(HEADER)) if pretrained or place not in (2, 7, 8, 9)]
    return [HEADER[place] for place in kept], [tuple(row[place] for place in kept) for row in rows]


def warn_of_distance(candidates: dict[str, Candidate]) -> None:
    """Say where no shape comes near enough."""
    decoder = candidates.get("decoder")
    for one in candidates.values():
        if decoder and one.match in ("parameters", "flops") and one.model.size == decoder.model.size:
            off = abs(value(one.cost, one.match) / value(decoder.cost, one.match) - 1)
            if off > WITHIN:
                warn(f"{one.name}: no shape is nearer than {off:.1%}; a larger size can be matched more closely")
