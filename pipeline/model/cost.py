"""What a model costs, from its settings alone: parameters, floating-point operations, memory of activations.

A matrix multiply of m × k by k × n counts 2mkn. Attention counts in full even where it is causal, the vocabulary only
where there is loss, and the backward pass twice the forward pass. Everything else is left out: it is a percent or two.
"""

from dataclasses import dataclass

from pipeline.model.config import Architecture


@dataclass(frozen=True)
class Parameters:
    """How many numbers are learnt, each counted once."""

    blocks: int
    """What is matched between families: everything outside the next three."""
    embedding: int
    positions: int
    output: int

    @property
    def total(self) -> int:
        return self.blocks + self.embedding + self.positions + self.output


def count_parameters(model: Architecture, vocab_size: int) -> Parameters:
    """Count the parameters of a transformer without building it."""
    check_family(model)
    norm = model.width * (2 if model.norm == "layer" and model.bias else 1)
    norms = norm * (2 if model.norm_place == "both" else 1)
    layer = attention_parameters(model, causal=False) + norms
    causal = attention_parameters(model, causal=True) + norms
    inputs = model.feed_forward * (2 if "glu" in model.activation else 1)
    feed_forward = model.width * (inputs + model.feed_forward) + (inputs + model.width) * model.bias + norms
    cross = layer if model.family == "encoder-decoder" else 0
    blocks = model.encoder_layers * (layer + feed_forward) + model.decoder_layers * (causal + cross + feed_forward)
    sides = (model.encoder_layers > 0) + (model.decoder_layers > 0)
    blocks += sides * norm * ((model.norm_place != "post") + model.embedding_norm)
    word_width = model.width - (model.position_width if model.position == "concatenated" else 0)
    output = vocab_size * (model.width * (not model.tie_embeddings) + model.output_bias)
    if model.head_transform:
        output += model.width * (model.width + 1) + norm
    return Parameters(blocks, vocab_size * word_width, position_parameters(model, sides), output)


def check_family(model: Architecture) -> None:
    if model.family == "recurrent":
        raise ValueError("costs are counted for transformers; a recurrent model is not matched with them")


def attention_parameters(model: Architecture, causal: bool) -> int:
    inner, shared = model.heads * model.head_width, 2 * model.kv_heads * model.head_width
    count = model.width * (2 * inner + shared) + (inner + shared + model.width) * model.bias
    count += 2 * model.head_width * model.qk_norm
    if model.attention == "low_rank" and not causal:
        count += 2 * model.attention_rank * model.max_positions
    return count


def position_parameters(model: Architecture, sides: int) -> int:
    """The tables of learned schemes; the relative one has (2k + 1) × heads a layer."""
    return {
        "learned": sides * model.max_positions * model.width,
        "relative": model.layers * (2 * model.relative_clip + 1) * model.heads,
        "t5": sides * model.position_buckets * model.heads,
    }.get(model.position, 0)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass over one sequence."""

    linear: int
    """Projections and feed-forward layers."""
    encoder_attention: int
    """Source to source: grows with M²."""
    cross_attention: int
    """Target to source: grows with MN."""
    decoder_attention: int
    """Target to target: grows with N²."""
    vocabulary: int

    @property
    def forward(self) -> int:
        return self.linear + self.encoder_attention + self.cross_attention + self.decoder_attention + self.vocabulary

    @property
    def training(self) -> int:
        """Forward and backward; recomputed activations are not counted."""
        return 3 * self.forward


def count_flops(model: Architecture, vocab_size: int, source: int, target: int, loss_positions: int) -> Flops:
    """Count for M source and N target tokens, of which so many carry loss; 0 where a family has no such side."""
    check_family(model)
    inner, shared = model.heads * model.head_width, 2 * model.kv_heads * model.head_width
    query, keys = 2 * model.width * 2 * inner, 2 * model.width * shared
    feed_forward = 2 * model.width * model.feed_forward * (3 if "glu" in model.activation else 2)
    encoder, decoder = model.encoder_layers, model.decoder_layers
    cross = model.family == "encoder-decoder" and target > 0  # else nobody looks at the source
    linear = encoder * source * (query + keys + feed_forward) + decoder * target * (query + keys + feed_forward)
    linear += decoder * (target * query + source * keys) * cross
    return Flops(
        linear,
        encoder * attention_flops(model, source, source, causal=False),
        decoder * attention_flops(model, target, source, causal=False) * cross,
        decoder * attention_flops(model, target, target, causal=True),
        loss_positions * 2 * model.width * (vocab_size + model.width * model.head_transform),
    )


def attention_flops(model: Architecture, queries: int, keys: int, causal: bool) -> int:
    """Scores and the weighted sum of values; with low rank also the mixing of keys and values, all linear in length."""
    inner = model.heads * model.head_width
    if model.attention != "low_rank" or causal:
        return 2 * 2 * queries * keys * inner
    mixing = 2 * 2 * model.attention_rank * keys * model.kv_heads * model.head_width
    return mixing + 2 * 2 * queries * model.attention_rank * inner


def activation_bytes(model: Architecture, source: int, target: int) -> int:
    """The memory that one training sequence keeps for the backward pass, without logits and recomputation.

    Counted are the tensors that autograd keeps; a test compares them with those it really keeps. Not counted are the
    scores that a CPU keeps of short sequences (fast.py).
    """
    encoder = layer_numbers(model, source, source) + feed_forward_numbers(model, source)
    decoder = layer_numbers(model, target, target) + feed_forward_numbers(model, target)
    if model.family == "encoder-decoder":
        decoder += layer_numbers(model, target, source, cross=True)
    numbers = model.encoder_layers * encoder + model.decoder_layers * decoder
    return 4 * (numbers + model.width * (1 + (model.dropout > 0)) * (source + target))


def layer_numbers(model: Architecture, queries: int, keys: int, cross: bool = False) -> int:
    """What one attention with its norm keeps."""
    inner, shared = model.heads * model.head_width, model.kv_heads * model.head_width
    rotated = model.position == "rotary" and not cross
    per_query = residual_numbers(model) + 2 * inner + model.heads + inner * model.qk_norm
    per_key = 2 * shared + shared * (rotated or model.qk_norm)
    learned_bias = model.position in ("relative", "t5") and not cross
    scores = model.heads * keys * (3 * (model.attention_dropout > 0) or learned_bias)  # no fast path: all are kept
    return queries * (per_query + scores) + keys * per_key


def feed_forward_numbers(model: Architecture, tokens: int) -> int:
    kept = 4 if "glu" in model.activation else 1 if model.activation == "relu" else 2
    return tokens * (residual_numbers(model) + model.feed_forward * (kept + 2 * (model.activation_dropout > 0)))


def residual_numbers(model: Architecture) -> int:
    """A layer's input, what its norms keep, and the mask of its dropout."""
    norms = 1 + (model.norm_place == "both")
    return model.width * (1 + norms + (model.dropout > 0))
