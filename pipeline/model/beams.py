"""Beam search: the most probable sequences of each prompt, by transformers' rules.

Shapes: B prompts, N sequences under way of each, R rows (those of all prompts), L tokens of prompt and new ones,
V vocabulary.
"""

import math
from operator import attrgetter

import torch
from torch import Tensor

from pipeline.config import GenerationConfig
from pipeline.model.decoding import Decoding
from pipeline.model.sampling import Generated, finished, restrain

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
        self.finished = sorted(self.finished, key=attrgetter("score"), reverse=True)[:beams]
        if len(self.finished) == beams and going:
            self.done |= going[0][0] / length**self.config.length_penalty <= self.finished[-1].score
        self.done |= not going
        return [*going[:beams], *[(-math.inf, self.end, best[0][2])] * (beams - len(going))]
