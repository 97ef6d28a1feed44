"""Writing on from a prompt: greedily, at random, or by beam search, with any family that can.

Shapes: B prompts, R rows (sequences under way of all prompts), T tokens of a prompt, L tokens of prompt and new ones,
V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn

from pipeline.bundle import Model
from pipeline.config import GenerationConfig
from pipeline.errors import UserError
from pipeline.model.beams import search
from pipeline.model.decoding import Decoding, SharedDecoding
from pipeline.model.packing import packed
from pipeline.model.sampling import NOTHING, Generated, draw, sample
from pipeline.model.transformer import Memory, Transformer


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    end: int,
    memory: Memory | None = None,
    first: int = 0,
    watch: Callable[[int], None] | None = None,
    answer: bool = False,
) -> list[list[Generated]]:
    """Write on from each prompt; return its sequences, the most probable first; `watch` is told a single one's tokens.

    An encoder-decoder goes on from a begin token (and what else it shall begin with) and the memory that `encode` makes
    of the sources. What is drawn at random follows from the seed and the number of the prompt, counted from `first`,
    whatever else is in the batch. Beam search returns fewer sequences than it should only if there are no more.
    `answer` says that prompts are the sources of a task: n-grams of them may be written, as an encoder-decoder may.
    """
    check(model, prompts, config, memory)
    rows = len(prompts) * max(config.beams, config.sequences)
    eager = torch.compiler.set_stance("force_eager")  # compiling for every length takes longer than writing
    with inference(model), eager, packed(*filter(None, (model.decoder, model.head)), rows=rows):
        ids_BT, real_BT = padded(prompts, model, left=True)
        history_BL = ids_BT.new_full((len(prompts), ids_BT.shape[1] + config.max_new_tokens), NOTHING)
        if not answer:
            history_BL[:, : ids_BT.shape[1]] = ids_BT if real_BT is None else ids_BT.where(real_BT, NOTHING)
        shared = config.beams > 1 and isinstance(model, Transformer)
        decoding = SharedDecoding(model, memory) if shared else Decoding(model, memory)
        logits_BV = decoding.prompt(ids_BT, real_BT, room=config.beams * config.max_new_tokens)
        if config.beams > 1:
            return search(decoding, logits_BV, history_BL, config, end)
        rows_R = torch.arange(len(prompts), device=ids_BT.device).repeat_interleave(config.sequences)
        if config.sequences > 1:
            decoding.select(rows_R[:, None])
        draws_RL = draw(config, range(first, first + len(prompts))).to(ids_BT.device)
        written = sample(decoding, logits_BV[rows_R], history_BL[rows_R], draws_RL, config, end, watch)
    groups = (written[place : place + config.sequences] for place in range(0, len(written), config.sequences))
    return [sorted(group, key=attrgetter("score"), reverse=True) for group in groups]


def encode(model: Model, sources: Sequence[Sequence[int]]) -> Memory:
    """Encode sources of any lengths, once for all that is to be written from them."""
    if not sources or not all(sources):
        raise UserError("an empty source: give it at least one token, such as the end token")
    ids_BS, real_BS = padded(sources, model, left=False)
    eager = torch.compiler.set_stance("force_eager")  # packed products cannot be compiled
    with inference(model), eager, packed(model.encoder or model, rows=ids_BS.numel()):
        return model.encode(ids_BS, real_BS)


def check(model: Model, prompts: Sequence[Sequence[int]], config: GenerationConfig, memory: Memory | None) -> None:
    """Refuse what cannot be done, in one line each."""
    family = model.architecture.family
    if model.decoder is None:
        raise UserError(f"a model of family {family} cannot write; use a decoder or an encoder-decoder")
    if family == "encoder-decoder" and memory is None:
        raise UserError("an encoder-decoder writes from a source, and there is none")
    if not prompts or not all(prompts):
        raise UserError("an empty prompt: give it at least one token, such as the begin token")
    longest, limit = max(map(len, prompts)), model.decoder.positions.limit
    if limit is not None and longest + config.max_new_tokens - 1 > limit:  # the last token is not read
        raise UserError(
            f"a prompt of {longest} tokens and {config.max_new_tokens} new ones, but the model has {limit} positions; "
            "shorten the prompt or max_new_tokens"
        )


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; afterwards what was training is training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def padded(sequences: Sequence[Sequence[int]], model: nn.Module, left: bool) -> tuple[Tensor, Tensor | None]:
    """Ids in a rectangle, and where they are no padding if there is any."""
    device = next(model.parameters()).device
    lengths_B = torch.tensor([len(sequence) for sequence in sequences], device=device)
    real_BT = torch.arange(int(lengths_B.max()), device=device) < lengths_B[:, None]
    if left:
        real_BT = real_BT.flip(1)
    ids_BT = torch.zeros(real_BT.shape, dtype=torch.long, device=device)
    ids_BT[real_BT] = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    return ids_BT, None if real_BT.all() else real_BT
