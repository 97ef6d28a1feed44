"""Using a bundle on text: what a pretrained model writes, and where it looks."""

import re
from pathlib import Path

from pipeline.bundle import Bundle, load_bundle
from pipeline.errors import UserError
from pipeline.evaluation.attention_maps import attention_maps
from pipeline.model.config import AttentionConfig, GenerateConfig
from pipeline.model.generation import encode, generate


def write_on(config: GenerateConfig) -> list[str]:
    """Go on from a prompt, or with an encoder-decoder answer it as a source; the most probable text first."""
    bundle = load_bundle(Path(config.bundle))
    family, tokenizer = bundle.model.architecture.family, bundle.tokenizer
    if family == "encoder":
        raise UserError(f"{config.bundle}: an encoder cannot write; use a decoder or an encoder-decoder")
    begin, end = start_of(bundle), tokenizer.id("end")
    prompt = special_encode(bundle, config.prompt)
    if family == "encoder-decoder":
        written = generate(bundle.model, [[begin]], config, end=end, memory=encode(bundle.model, [[*prompt, end]]))
        return [tokenizer.decode(one.ids, skip_special=False) for one in written[0]]
    written = generate(bundle.model, [[begin, *prompt]], config, end=end)
    return [config.prompt + tokenizer.decode(one.ids) for one in written[0]]


def draw_attention(config: AttentionConfig) -> list[Path]:
    """Draw where a model looks while it reads a text, and where its decoder looks while it reads a target."""
    bundle = load_bundle(Path(config.bundle))
    model, tokenizer = bundle.model, bundle.tokenizer
    read = special_encode(bundle, config.text)
    target = None if config.target is None else [start_of(bundle), *special_encode(bundle, config.target)]
    if model.architecture.family == "decoder":
        if target is not None:
            raise UserError("target: a decoder reads one text; only an encoder-decoder has a target")
        return attention_maps(model, tokenizer, None, [start_of(bundle), *read], Path(config.output))
    if model.architecture.family == "encoder":
        first = tokenizer.find("class")
        read = read if first is None else [first, *read]
    return attention_maps(model, tokenizer, read, target, Path(config.output))


def start_of(bundle: Bundle) -> int:
    """What a decoder reads first: the begin token, or padding where there is none, as in T5."""
    begin = bundle.tokenizer.find("begin")
    return bundle.tokenizer.id("pad") if begin is None else begin


def special_encode(bundle: Bundle, text: str) -> list[int]:
    """The ids of a text in which special tokens, such as the mask and the sentinels, may be written out."""
    tokenizer = bundle.tokenizer
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, tokenizer.special)) + ")", text):
        ids += [tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part)
    return ids
