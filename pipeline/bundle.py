"""A bundle: what a run hands on, one folder with weights, config, tokenizer and where they come from."""

import dataclasses
import importlib.metadata
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline import __version__
from pipeline.configuration import build, to_yaml
from pipeline.errors import UserError
from pipeline.files import check_output, described, file_hash, read_sealed, replacing, write_sealed, write_text
from pipeline.model.config import Architecture, ModelConfig, resolve
from pipeline.model.heads import ClassificationHead
from pipeline.model.recurrent import Recurrent
from pipeline.model.transformer import Transformer
from pipeline.tokenizer import Tokenizer

Model = Transformer | Recurrent
FORMAT = 1
WEIGHTS, CONFIG, TOKENIZER, META = "model.safetensors", "config.yaml", "tokenizer.json", "meta.json"
MEND = "copy or make the bundle again"


@dataclass
class Bundle:
    """A model with its tokenizer and its history."""

    model: Model
    tokenizer: Tokenizer
    meta: dict[str, Any] = field(default_factory=dict)
    """Lineage, fingerprints, metrics and versions."""


@dataclass(frozen=True, kw_only=True)
class BundleConfig:
    """What config.yaml of a bundle says."""

    model: ModelConfig


def save_bundle(bundle: Bundle, folder: Path) -> None:
    """Write a bundle; it is complete when meta.json is there, which is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META).unlink(missing_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in bundle.model.state_dict().items()}
    if bundle.model.architecture.tie_embeddings:
        del weights["head.output.weight"]  # the same memory as the embedding
    with replacing(folder / WEIGHTS) as temporary:
        save_file(weights, temporary, {"format": "pt"})
    written = ModelConfig(**dataclasses.asdict(bundle.model.architecture))  # in full: no later preset can change it
    write_text(folder / CONFIG, to_yaml(BundleConfig(model=written)))
    write_text(folder / TOKENIZER, bundle.tokenizer.text)
    meta = bundle.tokenizer.meta | bundle.meta | {
        "bundle_format": FORMAT,
        "vocab_size": bundle.model.vocab_size,
        "weights_sha256": file_hash(folder / WEIGHTS),
        "config_sha256": file_hash(folder / CONFIG),
        "versions": versions(),
        "git_commit": git_commit(),
    }  # fmt: skip
    write_sealed(folder / META, meta)


def check_target(folder: Path, key: str, value: str) -> None:
    """Refuse a folder that holds anything but a bundle with such a record, or one that was broken off."""
    told = read_sealed(folder / META, MEND) if (folder / META).is_file() else {}
    half = {WEIGHTS, CONFIG, TOKENIZER} if (folder / WEIGHTS).is_file() else set()
    check_output(folder, half, told.get(key) == value)


def load_bundle(folder: Path) -> Bundle:
    """Load a bundle, checked against its own record; nothing in it can run code."""
    if not (folder / META).is_file():
        raise UserError(f"{folder}: no bundle (it has no {META}); name the `bundle` folder of a finished run")
    meta = read_sealed(folder / META, MEND)
    if meta.get("bundle_format") != FORMAT:
        raise UserError(f"{folder}: not a bundle of format {FORMAT}; this program cannot read it")
    with described(folder / META, MEND):
        for key, path in (("weights_sha256", folder / WEIGHTS), ("config_sha256", folder / CONFIG)):
            if not path.is_file() or meta.get(key) not in (None, file_hash(path)):
                raise UserError(f"{path}: missing or damaged, its checksum differs; {MEND}")
        architecture = resolve(build(BundleConfig, [folder / CONFIG], {}).model)
        model = filled(architecture, meta["vocab_size"], len(meta.get("labels") or ()), folder / WEIGHTS)
    return Bundle(model.eval(), Tokenizer.load(folder), meta)


def filled(architecture: Architecture, vocab_size: int, labels: int, path: Path) -> Model:
    """A model with the weights of a file, once these are known to be all of its own: memory is asked for after that."""
    try:
        weights = load_file(path)
        if architecture.tie_embeddings:
            weights["head.output.weight"] = weights["embedding.weight"]
        if architecture.layers > len(weights):
            raise RuntimeError("more layers than weights")
        with torch.device("meta"):
            empty = with_head(architecture, vocab_size, labels)
        if shapes(empty.state_dict()) != shapes(weights):
            raise RuntimeError("other names or shapes")
        model = with_head(architecture, vocab_size, labels)
        model.load_state_dict(weights)
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{path}: not the weights of the model that {CONFIG} describes; {MEND}") from error
    return model


def with_head(architecture: Architecture, vocab_size: int, labels: int) -> Model:
    model = make_model(architecture, vocab_size)
    if labels:
        model.classifier = ClassificationHead(architecture.width, labels, dropout=0.0)
    return model


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def make_model(architecture: Architecture, vocab_size: int) -> Model:
    """A new model of any family."""
    family = Recurrent if architecture.family == "recurrent" else Transformer
    return family(architecture, vocab_size)


def versions() -> dict[str, str]:
    names = ("torch", "pytorch-lightning", "tokenizers", "safetensors")
    return {"triptych": __version__} | {name: importlib.metadata.version(name) for name in names}


def git_commit() -> str | None:
    """The commit that the working folder stands at, where it is a repository."""
    if not shutil.which("git"):
        return None
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
