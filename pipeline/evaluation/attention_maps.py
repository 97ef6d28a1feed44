"""Pictures of attention: how much each token looks at each other in every layer and head, and what masks let it see.

Shapes: H heads, T queries, S keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.bundle import Model
from pipeline.errors import UserError
from pipeline.evaluation.pictures import save
from pipeline.model.attention import attention_probabilities, visible
from pipeline.model.generation import inference
from pipeline.tokenizer import Tokenizer

MOST_LABELS = 48  # tokens; more cannot be read beside a map
MOST_NUMBERS = 24  # tokens; more numbers cannot be read in the cells
MOST_INCHES = 60.0  # of a side; a larger picture takes gigabytes to draw


@dataclass(frozen=True)
class Map:
    """The attention of one layer while a model reads."""

    kind: str
    """encoder and decoder look at themselves, the decoder causally; cross looks from the decoder at the encoder."""
    layer: int
    heads_HTS: Tensor
    """The exact probabilities."""
    queries: list[str]
    keys: list[str]


def find_maps(
    model: Model, tokenizer: Tokenizer, source: Sequence[int] | None, target: Sequence[int] | None, prefix: int = 0
) -> list[Map]:
    """The attention of every layer while a model reads a source, a target or both, layer by layer.

    So many tokens of the target are a prefix, which is read both ways.
    """
    device = next(model.parameters()).device

    def run() -> None:
        memory = model.encode(torch.tensor([source], device=device)) if source else None
        if target and model.decoder is not None:
            prefix_B = torch.tensor([prefix], device=device) if prefix else None
            model.decode(torch.tensor([target], device=device), memory=memory, prefix_B=prefix_B)

    with inference(model):
        found = attention_probabilities(model, run)
    if not found:
        raise UserError(f"a model of family {model.architecture.family} has no attention to draw here")
    maps: list[Map] = []
    for name, weights in found.items():
        heads_HTS = (weights[0] if weights.dim() == 4 else weights).float().cpu()
        kind = "cross" if ".cross" in name or name == "attention" else name.partition(".")[0]
        queries = source if kind == "encoder" else target
        keys = target if kind == "decoder" else source
        assert queries is not None and keys is not None
        layer = 1 + sum(other.kind == kind for other in maps)
        seen = labels(tokenizer, keys)
        if model.architecture.attention == "low_rank" and kind != "decoder":  # each key is a mixture of all tokens
            seen = [str(number) for number in range(1, heads_HTS.shape[-1] + 1)]
        maps.append(Map(kind, layer, heads_HTS, labels(tokenizer, queries), seen))
    return maps


def attention_maps(
    model: Model,
    tokenizer: Tokenizer,
    source: Sequence[int] | None,
    target: Sequence[int] | None,
    folder: Path,
    layer: int | None = None,
    head: int | None = None,
    prefix: int = 0,
) -> list[Path]:
    """Draw a picture of each kind of attention, its layers downwards and its heads to the right; or only some."""
    maps = [one for one in find_maps(model, tokenizer, source, target, prefix) if layer in (None, one.layer)]
    if not maps or (head is not None and head > min(len(one.heads_HTS) for one in maps)):
        raise UserError(f"layer and head: the model has no head {head or 1} in layer {layer or 1}; both count from 1")
    suffix = "".join(f"-{word}-{number}" for word, number in (("layer", layer), ("head", head)) if number)
    paths = []
    for kind in dict.fromkeys(one.kind for one in maps):
        paths.append(folder / f"{kind}{suffix}.png")
        save(draw_grid([one for one in maps if one.kind == kind], head), paths[-1])
    return paths


def labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as it is read."""
    return [tokenizer.decode([number], skip_special=False).replace("\n", "⏎") or "·" for number in ids]


def draw_grid(maps: list[Map], head: int | None = None) -> Any:
    """A row for every layer, a map for every head: queries downwards and keys to the right, the darker the more."""
    from matplotlib.figure import Figure

    chosen = range(len(maps[0].heads_HTS)) if head is None else [head - 1]
    single = head is not None and len(maps) == 1
    least, each = (3.0, 0.34) if single else (2.0, 0.17)  # inches of a map, and of a token
    width, height = (max(least, each * min(len(words), MOST_LABELS)) for words in (maps[0].keys, maps[0].queries))
    width, height = 0.6 + len(chosen) * (width + 0.8), 0.4 + len(maps) * (height + 0.9)
    figure = Figure((min(width, MOST_INCHES), min(height, MOST_INCHES)), layout="constrained")
    for row, one in enumerate(maps):
        for column, number in enumerate(chosen):
            axes = figure.add_subplot(len(maps), len(chosen), row * len(chosen) + column + 1)
            draw(axes, np.asarray(one.heads_HTS[number]), one.queries, one.keys, numbers=single)
            axes.set_title(f"{one.kind} layer {one.layer}, head {number + 1}", fontsize=8)
    return figure


def draw(axes: Any, weights_TS: Any, queries: Sequence[str], keys: Sequence[str], numbers: bool = False) -> None:
    """One map; where there is room, with its numbers."""
    axes.imshow(weights_TS, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    for axis, words in ((axes.xaxis, keys), (axes.yaxis, queries)):
        readable = len(words) <= MOST_LABELS
        axis.set_ticks(range(len(words)) if readable else [], labels=words if readable else [], parse_math=False)
    axes.tick_params(labelsize=6, length=0)
    axes.tick_params(axis="x", rotation=90 if max(map(len, keys), default=0) > 1 else 0)
    if numbers and max(len(queries), len(keys)) <= MOST_NUMBERS:
        for (row, column), weight in np.ndenumerate(weights_TS):
            shade = "white" if weight > 0.5 else "black"
            axes.text(column, row, f"{weight:.2f}", ha="center", va="center", color=shade, fontsize=6)


def draw_masks(tokens: Sequence[str], path: Path) -> Path:
    """Draw what each kind of mask lets each of some tokens see."""
    from matplotlib.figure import Figure

    masks = example_masks(len(tokens))
    side = max(2.0, 0.2 * min(len(tokens), MOST_LABELS))
    figure = Figure((len(masks) * (side + 0.6), side + 1.0), layout="constrained")
    for column, (name, allowed_TS) in enumerate(masks.items()):
        axes = figure.add_subplot(1, len(masks), column + 1)
        keys = [token if seen else "<pad>" for token, seen in zip(tokens, allowed_TS.any(0), strict=True)]
        draw(axes, allowed_TS.numpy(), tokens[: len(allowed_TS)], keys)
        axes.set_title(name, fontsize=9)
    save(figure, path)
    return path


def example_masks(count: int) -> dict[str, Tensor]:
    """What may be seen (T, S) of so many tokens under every kind of mask, as the models themselves make it."""
    places, half = torch.arange(count), torch.tensor([(count + 1) // 2])
    real_BS = (places < count - count // 4)[None]  # the last quarter is padding
    documents = (places >= half)[None].long()
    found = {
        "padding": visible(places, places, causal=False, real_BS=real_BS),
        "causal": visible(places, places, causal=True, bias=True),
        "prefix": visible(places, places, causal=True, prefix_B=half),
        "document": visible(places, places, causal=True, documents=(documents, documents)),
        "cross, from the first half": visible(places[:half], places, causal=False, real_BS=real_BS),
    }
    rows = {name: int(half) if name.startswith("cross") else count for name in found}
    shown = {name: seen.allowed for name, seen in found.items() if seen.allowed is not None}
    return {name: allowed[0, 0].expand(rows[name], count) for name, allowed in shown.items()}
