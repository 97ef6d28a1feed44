"""Models of others: BERT, GPT-2, T5, Llama, Qwen3, Apertus in the files of transformers, read and written without it.

Import and export follow the same tables, those of `forms`, and so cannot disagree. What a table cannot say exactly is
refused, by the name of the setting.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.bundle import META, Bundle
from pipeline.data.hub import one_line_errors
from pipeline.errors import UserError
from pipeline.files import read_json, replacing, write_json, write_text
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.forms import BERT, Form, config_for, form_for, read_config, settings_from
from pipeline.model.transformer import Transformer
from pipeline.terminal import note
from pipeline.tokenizer import Role, Tokenizer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ROLES: dict[str, Role] = {
    "pad_token": "pad", "unk_token": "unknown", "bos_token": "begin", "eos_token": "end", "sep_token": "separator",
    "cls_token": "class", "mask_token": "mask",
}  # fmt: skip


def import_model(source: str) -> Bundle:
    """Read a model and its tokenizer from a folder of transformers, or from the hub as hf:NAME.

    Of BERT, token types other than the first, the pooler and the next-sentence head are left behind. A file of the base
    class has no language head: unless that is the embedding, it begins with random values, the same every time.
    """
    folder = download(source.removeprefix("hf:")) if source.startswith("hf:") else Path(source)
    form, config = read_config(folder / CONFIG)
    tokenizer = read_tokenizer(folder)
    if tokenizer.vocab_size > config["vocab_size"]:
        raise UserError(f"{folder}: {tokenizer.vocab_size} tokens do not fit a vocab_size of {config['vocab_size']}")
    tensors = named(read_tensors(folder), form, folder)
    settings = settings_from(form, config)
    settings["tie_embeddings"] &= not differ(form, tensors)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = Transformer(resolve(ModelConfig(**settings)), config["vocab_size"])
    fill(model, form, tensors, folder, headless=config.get("architectures") == [form.base])
    return Bundle(model.eval(), tokenizer, {"imported_from": source, "imported_architecture": form.architecture})


def export_model(bundle: Bundle, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that AutoModel… and AutoTokenizer load; config.json comes last."""
    if (folder / META).exists():
        raise UserError(f"{folder}: holds a bundle, which would be overwritten; choose another folder")
    model = bundle.model
    if not isinstance(model, Transformer):
        raise UserError("a recurrent model has no counterpart in transformers; it cannot be exported")
    if model.classifier is not None:
        raise UserError("a fine-tuned classifier cannot be exported; export the bundle that it was fine-tuned from")
    form = form_for(model.architecture)
    config = config_for(form, model.architecture) | {"vocab_size": model.vocab_size} | token_ids(bundle)
    tensors = tensors_for(form, model, tied=config["tie_word_embeddings"] and model.architecture.tie_embeddings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    write_text(folder / TOKENIZER, bundle.tokenizer.text)
    write_json(folder / TOKENIZER_CONFIG, tokenizer_config(bundle))
    write_json(folder / CONFIG, config)


# --- Tensors -----------------------------------------------------------------------------------------------------

# Older names, and second names of one parameter.
RENAMED = {
    r"\.gamma$": ".weight",
    r"\.beta$": ".bias",
    r"^cls\.predictions\.bias$": "cls.predictions.decoder.bias",
    r"^(en|de)coder\.embed_tokens\.": "shared.",
}
# Buffers, and layers that no logit depends on.
UNUSED = re.compile(
    r"\.position_ids$|\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$|EncDecAttention\.relative_attention_bias\."
    r"|^(bert\.)?pooler\.|^cls\.seq_relationship\."
)


@dataclass(frozen=True)
class Row:
    """Parameters of ours that are parameters of theirs, put together in one way or another."""

    ours: list[str]
    theirs: list[str]
    how: str

    def joined(self, tensors: list[Tensor]) -> Tensor:
        """Ours, one above the other, from theirs."""
        if self.how == "&":
            return tensors[0] + tensors[1][0]
        return tensors[0].t() if self.how == "^T" else torch.cat(tensors)

    def parted(self, whole: Tensor) -> list[Tensor]:
        """Theirs, from ours one above the other."""
        if self.how == "&":
            return [whole, whole.new_zeros(2, whole.shape[1])]
        return [whole.t()] if self.how == "^T" else list(whole.chunk(len(self.theirs)))


def rows(form: Form, model: Transformer, names: Container[str]) -> Iterator[Row]:
    """The table of tensors for every block and every parameter of a model that is among the names."""
    for ours, theirs in form.tensors.items():
        how = next((sign for sign in ("&", "^T") if sign in theirs), "+")
        for block in range(model.architecture.layers if "{n}" in ours else 1):
            for parameter in (".weight", ".bias"):
                left, right = (
                    [layer.replace("{n}", str(block)) + parameter for layer in layers(side)] for side in (ours, theirs)
                )
                if left[0] in names:
                    yield Row(left, right, how)


def layers(side: str) -> list[str]:
    """The layers that one side of a table names."""
    parent, _, children = side.removesuffix(" ^T").partition("[")
    return [parent + child for child in re.split(r" [+&] ", children.removesuffix("]"))]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or from several that an index names."""
    if (folder / WEIGHTS).is_file():
        names = {WEIGHTS}
    elif (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise UserError(f"{folder / INDEX}: names no files; copy or download it again")
        names = {Path(str(name)).name for name in index["weight_map"].values()}
    else:
        raise UserError(
            f"{folder}: no {WEIGHTS}; a pickled pytorch_model.bin can run code and is never read: convert it where you "
            "trust it, with AutoModel….from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name}: missing or damaged ({error}); copy or download it again") from error
    return tensors


def named(tensors: dict[str, Tensor], form: Form, folder: Path) -> dict[str, Tensor]:
    """Tensors under the names of the table, without those that no logit depends on."""
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = table_name(stored, form)
        if name in found and not torch.equal(found[name], tensor):
            names = " and ".join(other for other in tensors if table_name(other, form) == name)
            raise UserError(f"{folder}: {names} differ; only models that share them can be imported")
        if not UNUSED.search(stored):
            found[name] = tensor
    return found


def table_name(name: str, form: Form) -> str:
    """What the table calls a tensor of a file of any age, with a language head or without."""
    for old, new in RENAMED.items():
        name = re.sub(old, new, name)
    return name if name.startswith((form.prefix, "cls.", "lm_head.")) else form.prefix + name


def differ(form: Form, tensors: dict[str, Tensor]) -> bool:
    """Whether a file has an output matrix that is not the embedding; transformers 5 then ties nothing."""
    output, embedding = (tensors.get(f"{form.tensors[layer]}.weight") for layer in ("head.output", "embedding"))
    return output is not None and embedding is not None and not torch.equal(output, embedding)


def fill(model: Transformer, form: Form, tensors: dict[str, Tensor], folder: Path, headless: bool) -> None:
    """Give a model the tensors of a folder, all of them and in the right shapes."""
    wanted = model.state_dict()
    if model.architecture.tie_embeddings:
        del wanted["head.output.weight"]
        tensors.pop(f"{form.tensors['head.output']}.weight", None)
    head = {name: tensor for name, tensor in wanted.items() if name.startswith("head.")} if headless else {}
    if head:
        note(f"{folder}: {form.base} has no language head; it begins with random values")
    weights = dict(head)
    for row in rows(form, model, wanted.keys() - head.keys()):
        if missing := [name for name in row.theirs if name not in tensors]:
            raise UserError(f"{folder}: no tensor {missing[0]} in it; copy or download it again")
        whole = row.joined([tensors.pop(name).float() for name in row.theirs])
        sizes = [len(wanted[name]) for name in row.ours]
        shape = (sum(sizes), *wanted[row.ours[0]].shape[1:])
        if whole.shape != shape:
            raise UserError(f"{folder}: {row.theirs[0]} makes {tuple(whole.shape)}, but {CONFIG} asks for {shape}")
        weights |= zip(row.ours, torch.split(whole, sizes), strict=True)
    if tensors:
        raise UserError(f"{folder}: tensor {next(iter(tensors))} has no place in {form.architecture}; it would be lost")
    if model.architecture.tie_embeddings:
        weights["head.output.weight"] = weights["embedding.weight"]
    model.load_state_dict(weights)


def tensors_for(form: Form, model: Transformer, tied: bool) -> dict[str, Tensor]:
    """The tensors of a model under the names of a form, each in memory of its own."""
    state = model.state_dict()
    if tied:
        del state["head.output.weight"]
    tensors: dict[str, Tensor] = {}
    for row in rows(form, model, state):
        tensors |= zip(row.theirs, row.parted(torch.cat([state[name] for name in row.ours])), strict=True)
    if form is BERT:
        tensors["cls.predictions.bias"] = tensors["cls.predictions.decoder.bias"]  # its name where they are tied
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


# --- Tokenizer and hub -------------------------------------------------------------------------------------------


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, which keeps what tokenizer_config.json says of it."""
    if not (folder / TOKENIZER).is_file():
        raise UserError(
            f"{folder}: no {TOKENIZER}; make it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) "
            "of transformers"
        )
    tokenizer = Tokenizer.load(folder)
    if (folder / TOKENIZER_CONFIG).is_file():
        tokenizer.meta[TOKENIZER_CONFIG] = read_json(folder / TOKENIZER_CONFIG)
    return tokenizer


def tokenizer_config(bundle: Bundle) -> dict[str, Any]:
    """What AutoTokenizer must know beside tokenizer.json: the roles of special tokens, and what came with an import."""
    tokens = {number: token for token, number in bundle.tokenizer.special.items()}
    found = {name: bundle.tokenizer.find(role) for name, role in ROLES.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token types
        "model_max_length": bundle.model.architecture.max_positions,
        **{name: tokens[number] for name, number in found.items() if number is not None},
        **bundle.tokenizer.meta.get(TOKENIZER_CONFIG, {}),
    }


def token_ids(bundle: Bundle) -> dict[str, int | None]:
    """The special ids in a config.json; without them transformers would take those of its own tokenizers."""
    find = bundle.tokenizer.find
    begin, end, pad = find("begin"), find("end"), find("pad")
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    if bundle.model.architecture.family == "encoder-decoder":
        ids["decoder_start_token_id"] = pad if begin is None else begin  # T5 begins with padding
    return ids


def download(name: str) -> Path:
    """Fetch a model of the hub into the hub's own cache: what we read, and nothing else."""
    from huggingface_hub import snapshot_download

    with one_line_errors(f"hf:{name}"):
        return Path(snapshot_download(name, allow_patterns=[CONFIG, "model*.safetensors", INDEX, "tokenizer*.json"]))
