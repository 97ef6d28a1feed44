"""Writing on from a prompt: greedily, at random, or by beam search, with any family that can.

Shapes: B prompts, N sequences under way of each, R rows (sequences under way of all prompts), T tokens of a prompt,
L tokens of prompt and new ones, S tokens in a cache, G n-grams, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.bundle import Model
from pipeline.config import GenerationConfig
from pipeline.errors import UserError
from pipeline.model.packing import packed
from pipeline.model.transformer import Branches, Memory, Transformer

NOTHING = -1  # what a history holds where there is no token


@dataclass(frozen=True)
class Generated:
    """A sequence that a model wrote."""

    ids: list[int]
    """Its tokens, without the prompt and without the end token."""
    score: float
    """Its log-probability (of the end token too) divided by its length to the power of the length penalty."""


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    end: int,
    memory: Memory | None = None,
    first: int = 0,
    watch: Callable[[int], None] | None = None,
) -> list[list[Generated]]:
    """Write on from each prompt; return its sequences, the most probable first; `watch` is told a single one's tokens.

    An encoder-decoder goes on from a begin token (and what else it shall begin with) and the memory that `encode` makes
    of the sources. What is drawn at random follows from the seed and the number of the prompt, counted from `first`,
    whatever else is in the batch. Beam search returns fewer sequences than it should only if there are no more.
    """
    check(model, prompts, config, memory)
    with inference(model), packed(*filter(None, (model.decoder, model.head))):
        ids_BT, real_BT = padded(prompts, model, left=True)
        history_BL = ids_BT.new_full((len(prompts), ids_BT.shape[1] + config.max_new_tokens), NOTHING)
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
    return [sorted(group, key=score, reverse=True) for group in groups]


def encode(model: Model, sources: Sequence[Sequence[int]]) -> Memory:
    """Encode sources of any lengths, once for all that is to be written from them."""
    if not sources or not all(sources):
        raise UserError("an empty source: give it at least one token, such as the end token")
    with inference(model):
        return model.encode(*padded(sources, model, left=False))


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


# --- A model under way -------------------------------------------------------------------------------------------


class Decoding:
    """Sequences under way with any model, each a row of its cache."""

    def __init__(self, model: Model, memory: Memory | None) -> None:
        self.model, self.memory = model, memory

    def prompt(self, ids_BT: Tensor, real_BT: Tensor | None, room: int) -> Tensor:
        """Read the prompts and return the logits (B, V) of what follows; keep room for so many tokens more."""
        prefix_B = None
        if self.model.architecture.prefix_attention == "bidirectional":
            prefix_B = torch.full(ids_BT.shape[:1], ids_BT.shape[1], device=ids_BT.device)
        self.cache = self.model.new_cache(ids_BT.shape[1] + room)
        states_BTC = self.model.decode(ids_BT, real_BT, self.memory, prefix_B, cache=self.cache)
        return self.model.logits(states_BTC[:, -1]).float()

    def select(self, parents_BN: Tensor) -> None:
        """Let each sequence go on from one that was under way, counted over all prompts."""
        self.cache.reorder(parents_BN.flatten())
        self.memory = self.memory and self.memory.select(parents_BN.flatten())

    def step(self, ids_BN: Tensor) -> Tensor:
        """Read one more token of each sequence and return the logits (B, N, V) of what follows."""
        states = self.model.decode(ids_BN.reshape(-1, 1), memory=self.memory, cache=self.cache)
        return self.model.logits(states).float().view(*ids_BN.shape, -1)


class SharedDecoding(Decoding):
    """Sequences under way with a transformer; those of one prompt share a row of its cache, where nothing moves.

    Selecting costs a mask instead of a copy of the cache; each sequence reads past what its siblings wrote.
    """

    def prompt(self, ids_BT: Tensor, real_BT: Tensor | None, room: int) -> Tensor:
        self.position = ids_BT.shape[1]
        self.positions_S = torch.arange(self.position + room, device=ids_BT.device)
        self.own_BNS = torch.zeros(len(ids_BT), 1, self.position + room, dtype=torch.bool, device=ids_BT.device)
        self.own_BNS[:, 0, : self.position] = True if real_BT is None else real_BT
        return super().prompt(ids_BT, real_BT, room)

    def select(self, parents_BN: Tensor) -> None:
        prompts_B, beams = parents_BN[:, 0] // self.own_BNS.shape[1], parents_BN % self.own_BNS.shape[1]
        if len(prompts_B) < len(self.own_BNS):
            super().select(prompts_B)
            self.own_BNS = self.own_BNS[prompts_B]
        self.own_BNS = self.own_BNS.take_along_dim(beams[..., None], dim=1)

    def step(self, ids_BN: Tensor) -> Tensor:
        assert isinstance(self.model, Transformer)
        beams, start = ids_BN.shape[1], self.cache.length
        new = slice(start, start + beams)
        self.own_BNS[..., new] = torch.eye(beams, dtype=torch.bool, device=ids_BN.device)
        self.positions_S[new] = self.position
        self.position += 1
        branches = Branches(self.positions_S[: new.stop], self.own_BNS[..., : new.stop])
        states_BNC = self.model.decode(ids_BN, memory=self.memory, cache=self.cache, branches=branches)
        return self.model.logits(states_BNC).float()


# --- Greedily and at random --------------------------------------------------------------------------------------


def sample(
    decoding: Decoding,
    logits_RV: Tensor,
    history_RL: Tensor,
    draws_RL: Tensor,
    config: GenerationConfig,
    end: int,
    watch: Callable[[int], None] | None = None,
) -> list[Generated]:
    """Choose a token for each sequence, again and again until all have ended.

    Those that have ended leave when they are half of the rows: leaving copies the cache of the others.
    """
    start = history_RL.shape[1] - config.max_new_tokens
    total_R = logits_RV.new_zeros(len(logits_RV))
    rows = list(range(len(logits_RV)))  # which sequence each row is
    written: dict[int, Generated] = {}
    for length in range(1, config.max_new_tokens + 1):
        logs_RV = logits_RV.log_softmax(-1)
        restrain(logits_RV, history_RL[:, : start + length - 1], length, config, end)
        chosen_R = choose(logits_RV, draws_RL[:, length - 1], config)
        total_R = total_R + logs_RV.gather(-1, chosen_R[:, None])[:, 0]
        history_RL[:, start + length - 1] = chosen_R
        for row, token in enumerate(chosen_R.tolist()):
            if watch and token != end:
                watch(token)
            if (token == end or length == config.max_new_tokens) and rows[row] not in written:
                ids = history_RL[row, start : start + length].tolist()
                written[rows[row]] = finished(ids, total_R[row].item(), config, end)
        going = [row for row, sequence in enumerate(rows) if sequence not in written]
        if not going:
            break
        if 2 * len(going) <= len(rows):
            rows = [rows[row] for row in going]
            kept_R = torch.tensor(going, device=chosen_R.device)
            chosen_R, total_R, history_RL, draws_RL = (x[kept_R] for x in (chosen_R, total_R, history_RL, draws_RL))
            decoding.select(kept_R[:, None])
        logits_RV = decoding.step(chosen_R[:, None])[:, 0]
    return [generated for _, generated in sorted(written.items())]


def draw(config: GenerationConfig, prompts: Sequence[int]) -> Tensor:
    """Numbers from 0 to 1, one for each token of each sequence of these prompts."""
    keys = [(config.seed, prompt, sequence) for prompt in prompts for sequence in range(config.sequences)]
    return torch.tensor(np.array([np.random.default_rng(key).random(config.max_new_tokens) for key in keys]))


def choose(logits_RV: Tensor, draws_R: Tensor, config: GenerationConfig) -> Tensor:
    """The most probable token of each row, or where the draw falls when probabilities are laid side by side."""
    if not config.temperature and logits_RV.device.type == "cpu":
        return torch.from_numpy(logits_RV.numpy().argmax(-1))  # several times as fast as torch's
    if not config.temperature:
        return logits_RV.argmax(-1)
    ends_RV = filtered(logits_RV, config).softmax(-1, dtype=torch.float64).cumsum(-1)
    return torch.searchsorted(ends_RV, draws_R[:, None] * ends_RV[:, -1:], right=True)[:, 0]


def filtered(logits_RV: Tensor, config: GenerationConfig) -> Tensor:
    """Logits at a temperature, of the tokens only from which one may be drawn."""
    logits_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / config.temperature
    if config.top_k:
        least_R1 = logits_RV.topk(min(config.top_k, logits_RV.shape[-1])).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -math.inf)
    if config.top_p < 1:
        ordered_RV = logits_RV.sort(descending=True).values
        share_RV = ordered_RV.softmax(-1)
        needed_R1 = (share_RV.cumsum(-1) - share_RV < config.top_p).sum(-1, keepdim=True)
        logits_RV = logits_RV.masked_fill(logits_RV < ordered_RV.gather(-1, needed_R1 - 1), -math.inf)
    return logits_RV


def restrain(logits_RV: Tensor, history_RL: Tensor, length: int, config: GenerationConfig, end: int) -> None:
    """Rule out the end before its time and n-grams that were there before, in place."""
    ends_R = logits_RV[:, end].clone()
    if length <= config.min_new_tokens:
        logits_RV[:, end] = -math.inf
    size = config.no_repeat_ngram
    if not size or history_RL.shape[1] < size:
        return
    grams_RGn = history_RL.unfold(1, size, 1)
    latest_Rn = history_RL[:, history_RL.shape[1] - size + 1 :]
    again_RG = (grams_RGn[..., :-1] == latest_Rn[:, None]).all(-1) & (grams_RGn[..., -1] != NOTHING)
    rows, grams = again_RG.nonzero(as_tuple=True)
    logits_RV[rows, grams_RGn[rows, grams, -1]] = -math.inf
    stuck_R = logits_RV.amax(-1) == -math.inf
    logits_RV[stuck_R, end] = ends_R[stuck_R]


def finished(ids: list[int], total: float, config: GenerationConfig, end: int) -> Generated:
    return Generated(ids[:-1] if ids[-1] == end else ids, total / len(ids) ** config.length_penalty)


def score(generated: Generated) -> float:
    return generated.score


# --- Beam search -------------------------------------------------------------------------------------------------

Candidate = tuple[float, int, int]  # log-probability with the next token, that token, the sequence it goes on from


def search(
    decoding: Decoding, logits_BV: Tensor, history_BL: Tensor, config: GenerationConfig, end: int
) -> list[list[Generated]]:
    """Follow the most probable sequences of each prompt until no better one can come, by transformers' rules."""
    start = history_BL.shape[1] - config.max_new_tokens
    history_BNL, logits_BNV, total_BN = history_BL[:, None], logits_BV[:, None], logits_BV.new_zeros(len(logits_BV), 1)
    hypotheses = [Hypotheses(config, end) for _ in history_BL]
    rows = hypotheses
    for length in range(1, config.max_new_tokens + 1):
        written_BNL = history_BNL[..., : start + length - 1]
        found = candidates(logits_BNV, total_BN, written_BNL, length, config, end)
        new_RL = written_BNL.flatten(0, 1)[:, start:]
        beams = [row.advance(best, new_RL, length) for row, best in zip(rows, found, strict=True)]
        going = [place for place, row in enumerate(rows) if not row.done]
        if not going:
            break
        if 2 * len(going) <= len(rows):
            rows, beams = [rows[place] for place in going], [beams[place] for place in going]
        device = history_BL.device
        total_BN = torch.tensor([[total for total, _, _ in row] for row in beams], device=device)
        tokens_BN = torch.tensor([[token for _, token, _ in row] for row in beams], device=device)
        parents_BN = torch.tensor([[parent for _, _, parent in row] for row in beams], device=device)
        history_BNL = history_BNL.flatten(0, 1)[parents_BN]
        history_BNL[..., start + length - 1] = tokens_BN
        decoding.select(parents_BN)
        logits_BNV = decoding.step(tokens_BN)
    return [one.finished[: config.sequences] for one in hypotheses]


def candidates(
    logits_BNV: Tensor, total_BN: Tensor, history_BNL: Tensor, length: int, config: GenerationConfig, end: int
) -> list[list[Candidate]]:
    """The best continuations of each prompt: twice as many as beams, since half of them may end."""
    logs_BNV = logits_BNV.log_softmax(-1)
    restrain(logs_BNV.flatten(0, 1), history_BNL.flatten(0, 1), length, config, end)
    wanted = 2 * config.beams
    own = logs_BNV.topk(min(wanted, logs_BNV.shape[-1]))  # the best of all are among the best of each
    totals = (own.values + total_BN[..., None]).flatten(1)
    best = totals.topk(min(wanted, totals.shape[1]))
    tokens = own.indices.flatten(1).gather(1, best.indices)
    first_B1 = torch.arange(len(total_BN), device=total_BN.device)[:, None] * total_BN.shape[1]
    parents = first_B1 + best.indices // own.indices.shape[-1]
    columns = zip(best.values.tolist(), tokens.tolist(), parents.tolist(), strict=True)
    return [list(zip(*column, strict=True)) for column in columns]


class Hypotheses:
    """What beam search has found for one prompt."""

    def __init__(self, config: GenerationConfig, end: int) -> None:
        self.config, self.end = config, end
        self.finished: list[Generated] = []
        self.done = False

    def advance(self, best: list[Candidate], written_RL: Tensor, length: int) -> list[Candidate]:
        """Take up those that end and return those to go on with, as many as beams; filled up with impossible ones.

        Only the first beams of the candidates may end; it is done when the best that goes on is no better, at its
        present length, than the worst that ended.
        """
        beams, last = self.config.beams, length == self.config.max_new_tokens
        going: list[Candidate] = []
        for rank, (total, token, parent) in enumerate(best):
            if self.done or total == -math.inf:
                break
            if token != self.end and not last:
                going.append((total, token, parent))
            elif rank < beams:
                ids = [*written_RL[parent].tolist(), token]
                self.finished.append(finished(ids, total, self.config, self.end))
        self.finished = sorted(self.finished, key=score, reverse=True)[:beams]
        if len(self.finished) == beams and going:
            self.done |= going[0][0] / length**self.config.length_penalty <= self.finished[-1].score
        self.done |= not going
        return [*going[:beams], *[(-math.inf, self.end, best[0][2])] * (beams - len(going))]
