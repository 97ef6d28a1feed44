"""The next token of each sequence: the most probable one, or one drawn at random, and what may not be written.

Shapes: R rows (sequences under way of all prompts), L tokens of prompt and new ones, G n-grams, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.config import GenerationConfig
from pipeline.model.decoding import Decoding

NOTHING = -1  # what a history holds where there is no token


@dataclass(frozen=True)
class Generated:
    """A sequence that a model wrote."""

    ids: list[int]
    """Its tokens, without the prompt and without the end token."""
    score: float
    """Its log-probability (of the end token too) divided by its length to the power of the length penalty."""


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
