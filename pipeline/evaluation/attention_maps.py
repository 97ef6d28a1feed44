"""Pictures of attention: for every layer and head, how much each token looks at each other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.bundle import Model
from pipeline.errors import UserError
from pipeline.files import replacing
from pipeline.model.attention import attention_probabilities
from pipeline.model.generation import inference
from pipeline.tokenizer import Tokenizer

MOST_LABELS = 48  # tokens; more cannot be read beside a map


def attention_maps(
    model: Model, tokenizer: Tokenizer, source: Sequence[int] | None, target: Sequence[int] | None, folder: Path
) -> list[Path]:
    """Draw the attention of every layer while a model reads a source, a target or both; one picture a layer."""
    device = next(model.parameters()).device

    def run() -> None:
        memory = model.encode(torch.tensor([source], device=device)) if source else None
        if target and model.decoder is not None:
            model.decode(torch.tensor([target], device=device), memory=memory)

    with inference(model):
        found = attention_probabilities(model, run)
    if not found:
        raise UserError(f"a model of family {model.architecture.family} has no attention to draw here")
    pictures = []
    for name, weights in found.items():
        heads_HTS = (weights[0] if weights.dim() == 4 else weights).float().cpu()
        reads_source = name.startswith("encoder") or ".cross" in name or name == "attention"
        queries = source if name.startswith("encoder") else target
        keys = source if reads_source else target
        assert queries is not None and keys is not None
        path = folder / f"{name.removesuffix('.layer').replace('blocks.', '')}.png"
        draw(heads_HTS, labels(tokenizer, queries), labels(tokenizer, keys), path)
        pictures.append(path)
    return pictures


def labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as it is read."""
    return [tokenizer.decode([number], skip_special=False).replace("\n", "⏎") or "·" for number in ids]


def draw(heads_HTS: Tensor, queries: list[str], keys: list[str], path: Path) -> None:
    """One map a head, queries downwards and keys to the right; the darker, the more."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(heads_HTS))
    rows = -(-len(heads_HTS) // columns)
    width, height = (max(2.2, 0.16 * len(keys)), max(2.2, 0.16 * len(queries)))
    figure = Figure(figsize=(1.2 + columns * (width + 0.7), 0.6 + rows * (height + 1.1)), layout="constrained")
    FigureCanvasAgg(figure)
    for head, weights_TS in enumerate(heads_HTS):
        axes = figure.add_subplot(rows, columns, head + 1)
        axes.imshow(np.asarray(weights_TS), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
        axes.set_title(f"head {head + 1}", fontsize=9)
        for axis, words in ((axes.xaxis, keys), (axes.yaxis, queries)):
            readable = len(words) <= MOST_LABELS
            axis.set_ticks(range(len(words)) if readable else [], labels=words if readable else [])
        axes.tick_params(labelsize=6, length=0)
        axes.tick_params(axis="x", rotation=90)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
