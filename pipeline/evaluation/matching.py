"""Sizes that make families comparable: the decoder is the reference, and the others are solved for."""

from dataclasses import dataclass, replace

from pipeline.data.config import OBJECTIVES, ObjectiveConfig
from pipeline.data.objectives import span_lengths
from pipeline.evaluation.config import Rule
from pipeline.model.config import Architecture, ModelConfig, resolve, split_blocks
from pipeline.model.cost import count_flops, count_parameters

WITHIN = 0.01
FEED_FORWARD_UNITS = (32, 8)  # of a small model, 32 may be more than a percent


@dataclass(frozen=True)
class Cost:
    """What a model of a study costs under every measure."""

    parameters: int
    """Of the blocks: outside embeddings, output, positions and heads."""
    all_parameters: int
    flops: int
    """Of training on one window."""


def cost_of(model: Architecture, vocab_size: int, window: int, objective: ObjectiveConfig) -> Cost:
    """Count a model's cost on windows of so many raw tokens."""
    source, target, predicted = lengths(model, window, objective)
    if model.family == "recurrent":
        return recurrent_cost(model, vocab_size, source, target, predicted)
    counted = count_parameters(model, vocab_size)
    return Cost(counted.blocks, counted.total, count_flops(model, vocab_size, source, target, predicted).training)


def lengths(model: Architecture, window: int, objective: ObjectiveConfig) -> tuple[int, int, int]:
    """Source tokens, target tokens and predicted tokens that an objective makes of a window, on average over a run."""
    rate = (objective.rate + (objective.final_rate or objective.rate)) / 2
    parts = objective.schedule or {objective.name or OBJECTIVES[model.family][0]: 1.0}
    if model.family == "encoder-decoder":
        half = window // 2
        sides = {"span": span_lengths(window, rate, objective.span_length), "prefix": (half + 1, window - half)}
        source, target = (round(sum(share * sides[name][side] for name, share in parts.items())) for side in (0, 1))
        return source, target, target
    hybrid = objective.causal_share + (1 - objective.causal_share) * rate
    loss_shares = {"causal": 1.0, "prefix": 0.5, "masked": rate, "hybrid": hybrid}
    predicted = round(window * sum(share * loss_shares[name] for name, share in parts.items()))
    return (window + 1, 0, predicted) if model.family == "encoder" else (0, window, predicted)


def recurrent_cost(model: Architecture, vocab_size: int, source: int, target: int, predicted: int) -> Cost:
    """Of a recurrent model, which is never matched."""
    import torch

    from pipeline.model.recurrent import Recurrent

    with torch.device("meta"):
        made = Recurrent(model, vocab_size)
    total = sum(parameter.numel() for parameter in made.parameters())
    others = (made.embedding, made.head, made.encoder.positions, made.decoder.positions)
    blocks = total - sum(parameter.numel() for part in others for parameter in part.parameters())
    blocks += made.embedding.weight.numel() if model.tie_embeddings else 0  # of both parts, and counted out twice
    return Cost(blocks, total, made.training_flops(source, target, predicted))


def matched(
    own: ModelConfig, reference: ModelConfig, rule: Rule, vocab_size: int, window: int, objective: ObjectiveConfig
) -> ModelConfig:
    """The settings of a model, made to cost what a decoder with the reference's costs, to within a percent."""
    decoder, family = resolve(replace(reference, family="decoder")), own.family
    goal, shape = value(cost_of(decoder, vocab_size, window, ObjectiveConfig(name="causal")), rule), resolve(own)
    if rule == "tokens" or (family == "decoder" and value(cost_of(shape, vocab_size, window, objective), rule) == goal):
        return own

    def error(blocks: int, feed_forward: int) -> float:
        sides = split_blocks(own.family, blocks)
        model = replace(shape, encoder_layers=sides[0], decoder_layers=sides[1], feed_forward=feed_forward)
        return value(cost_of(model, vocab_size, window, objective), rule) / goal - 1

    least, usual = (2 if family == "encoder-decoder" else 1), decoder.feed_forward
    blocks = min(range(least, 4 * decoder.layers + 1), key=lambda count: (abs(error(count, usual)), count))
    counts = range(max(least, blocks - 2), blocks + 3)
    for unit in FEED_FORWARD_UNITS:
        near = [(count, width) for count in counts for width in range(unit, 8 * decoder.width + 1, unit)]
        if close := [pair for pair in near if abs(error(*pair)) <= WITHIN]:
            break
    close = close or [min(near, key=lambda pair: abs(error(*pair)))]
    best = min(close, key=lambda pair: (abs(pair[1] - usual), abs(error(*pair))))  # a shape most like the reference's
    return replace(own, layers=best[0], feed_forward=best[1])


def value(cost: Cost, rule: Rule) -> int:
    return cost.parameters if rule == "parameters" else cost.flops
