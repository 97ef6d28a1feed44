"""What can be set about a model: a preset and a size, and every setting of them by name. Light: no torch."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from pipeline.errors import UserError

Family = Literal["encoder", "decoder", "encoder-decoder", "recurrent"]
Preset = Literal["original", "bert", "gpt2", "t5", "llama", "modern", "modern-1"]
Size = Literal["tiny", "mini", "small", "base"]
Norm = Literal["layer", "rms"]
NormPlace = Literal["pre", "post", "both"]
Activation = Literal["relu", "gelu", "gelu_tanh", "relu_squared", "swiglu", "geglu", "geglu_tanh"]
Position = Literal["none", "sinusoidal", "learned", "concatenated", "relative", "t5", "rotary", "alibi"]
AttentionKind = Literal["dot", "argmax", "low_rank"]
Initialisation = Literal["normal", "scaled", "xavier"]
Cell = Literal["rnn", "gru", "lstm"]
Alignment = Literal["none", "dot", "general", "location"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model with every setting decided."""

    family: Family
    width: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    norm: Norm
    norm_place: NormPlace
    norm_epsilon: float
    embedding_norm: bool
    activation: Activation
    bias: bool
    qk_norm: bool
    tie_embeddings: bool
    embedding_scale: bool
    output_scale: bool
    output_bias: bool
    head_transform: bool
    logit_soft_cap: float
    dropout: float
    attention_dropout: float
    activation_dropout: float
    position: Position
    max_positions: int
    position_width: int
    relative_clip: int
    position_buckets: int
    position_distance: int
    rotary_base: float
    attention: AttentionKind
    attention_scale: bool
    attention_normalise: Literal["softmax", "none"]
    attention_rank: int
    attention_window: int
    prefix_attention: Literal["causal", "bidirectional"]
    initialisation: Initialisation
    initial_deviation: float
    zero_output: bool
    cell: Cell
    bidirectional: bool
    alignment: Alignment

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other, in one line each."""
        for name in (
            "width", "heads", "kv_heads", "head_width", "feed_forward", "max_positions", "relative_clip",
            "position_buckets", "position_distance", "attention_rank",
        ):  # fmt: skip
            if not 1 <= getattr(self, name) <= LARGEST:
                raise UserError(f"model.{name}: {getattr(self, name)} must be from 1 to {LARGEST:,}")
        for name in ("norm_epsilon", "initial_deviation"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"model.{name}: {getattr(self, name)} must not be negative")
        if not 0 < self.rotary_base < math.inf:
            raise UserError(f"model.rotary_base: {self.rotary_base} must be above 0")
        for name in DROPOUTS:
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name}: {getattr(self, name)} must be from 0 up to 1")
        if self.layers > LARGEST_DEPTH:
            raise UserError(f"model.layers: {self.layers} must be at most {LARGEST_DEPTH:,}")
        if min(self.encoder_layers, self.decoder_layers, self.attention_window) < 0 or not self.logit_soft_cap >= 0:
            raise UserError("model: layers, attention_window and logit_soft_cap must not be negative")
        sides = {"encoder": (True, False), "decoder": (False, True)}.get(self.family, (True, True))
        if (self.encoder_layers > 0, self.decoder_layers > 0) != sides:
            raise UserError(
                f"model: a model of family {self.family} cannot have {self.encoder_layers} encoder and "
                f"{self.decoder_layers} decoder layers"
            )
        if self.heads % self.kv_heads:
            raise UserError(f"model.kv_heads: {self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.position == "rotary" and self.head_width % 2:
            raise UserError(f"model.position: rotary needs an even head width, not {self.head_width}")
        if self.position == "concatenated" and not 0 < self.position_width < self.width:
            raise UserError(f"model.position_width: {self.position_width} must lie within the width {self.width}")
        if self.position == "t5" and (self.position_buckets < 4 or self.position_distance <= self.position_buckets):
            raise UserError("model.position: T5 needs at least 4 position_buckets and a larger position_distance")
        if self.family == "recurrent" and self.position in ("relative", "t5", "rotary", "alibi"):
            raise UserError(f"model.position: {self.position} acts on self-attention, which a recurrent model has not")
        if self.family == "recurrent" and self.bidirectional and self.width % 2:
            raise UserError(f"model.width: {self.width} must be even for a recurrent encoder that reads both ways")
        if self.attention == "low_rank" and self.family in ("decoder", "recurrent"):
            raise UserError(f"model.attention: low_rank mixes all positions, which a {self.family} must not; use dot")
        if self.attention == "low_rank" and (self.attention_window or self.position in ("relative", "t5", "alibi")):
            raise UserError("model.attention: low_rank has no scores between positions: no attention_window, no biases")
        if self.attention_normalise == "none" and self.attention != "low_rank":
            raise UserError("model.attention_normalise: none is for low_rank attention only")

    @property
    def layers(self) -> int:
        """Blocks on both sides."""
        return self.encoder_layers + self.decoder_layers

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence, where something has a table of them."""
        located = self.family == "recurrent" and self.alignment == "location"
        return self.max_positions if located or self.position == "learned" or self.attention == "low_rank" else None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: a preset at a size, with any setting changed; what is null comes from the preset or the size."""

    family: Family = "encoder"
    """The kind of transformer, or the recurrent baseline."""
    preset: Preset = "modern"
    """Settings of a published model, or our own: modern is always the newest of ours, today modern-1."""
    size: Size = "small"
    """Width and blocks: tiny 128 × 2, mini 192 × 4, small 256 × 6, base 768 × 12."""
    width: int | None = None
    """The width of the residual stream."""
    layers: int | None = None
    """Blocks in all; an encoder-decoder has half of them on each side."""
    encoder_layers: int | None = None
    """Blocks of the encoder, where the two sides differ."""
    decoder_layers: int | None = None
    """Blocks of the decoder, where the two sides differ."""
    heads: int | None = None
    """Attention heads (queries)."""
    kv_heads: int | None = None
    """Heads of keys and values; fewer than heads is grouped-query attention, 1 is multi-query."""
    head_width: int | None = None
    """The width of one head."""
    feed_forward: int | None = None
    """The inner width of the feed-forward layer."""
    norm: Norm | None = None
    """Layer norm or root-mean-square norm."""
    norm_place: NormPlace | None = None
    """Before each layer, after adding its result, or before and after each layer."""
    norm_epsilon: float | None = None
    """Added under the square root of a norm."""
    embedding_norm: bool | None = None
    """Normalise the embeddings before the first block."""
    activation: Activation | None = None
    """The non-linearity of the feed-forward layer; the -glu kinds have a gate."""
    bias: bool | None = None
    """Biases in linear layers and norms."""
    qk_norm: bool | None = None
    """Normalise queries and keys, each head by itself."""
    tie_embeddings: bool | None = None
    """Use the embedding matrix as the output matrix."""
    embedding_scale: bool | None = None
    """Multiply embeddings by the square root of the width."""
    output_scale: bool | None = None
    """Divide the last states by the square root of the width."""
    output_bias: bool | None = None
    """A bias on the logits."""
    head_transform: bool | None = None
    """A linear layer, activation and norm before the output matrix."""
    logit_soft_cap: float | None = None
    """Keep logits within ± this by a tanh; 0 is off."""
    dropout: float | None = None
    """Dropout of embeddings and of each layer's result."""
    attention_dropout: float | None = None
    """Dropout of attention probabilities; above 0 it costs the fast path of attention in training."""
    activation_dropout: float | None = None
    """Dropout inside the feed-forward layer."""
    position: Position | None = None
    """How the model knows where a token stands."""
    max_positions: int | None = None
    """The longest sequence, for schemes with a table and for low-rank attention."""
    position_width: int | None = None
    """The part of the width that holds concatenated positions; a quarter by default."""
    relative_clip: int | None = None
    """Relative distances beyond this share one bias."""
    position_buckets: int | None = None
    """Buckets of T5's relative bias."""
    position_distance: int | None = None
    """The distance from which T5's buckets no longer grow."""
    rotary_base: float | None = None
    """The slowest rotation of rotary positions."""
    attention: AttentionKind | None = None
    """Dot product, hard (argmax), or low-rank by learned projections of keys and values."""
    attention_scale: bool | None = None
    """Divide scores by the square root of the head width."""
    attention_normalise: Literal["softmax", "none"] | None = None
    """Turn scores into probabilities, or use them as they are (low-rank only)."""
    attention_rank: int | None = None
    """The rank of low-rank attention."""
    attention_window: int | None = None
    """How far a token sees, to each side it may see; 0 is everywhere."""
    prefix_attention: Literal["causal", "bidirectional"] | None = None
    """How a decoder attends within the source of a text-to-text task."""
    initialisation: Initialisation | None = None
    """Normal; normal with residual projections scaled down by depth; or Xavier uniform."""
    initial_deviation: float | None = None
    """The standard deviation of the normal kinds."""
    zero_output: bool | None = None
    """Begin with residual projections of zero, so that each block is the identity."""
    cell: Cell | None = None
    """The cell of the recurrent family."""
    bidirectional: bool | None = None
    """Whether the recurrent encoder reads both ways."""
    alignment: Alignment | None = None
    """How the recurrent decoder attends to the encoder (Luong); none is the bottleneck."""

    def __post_init__(self) -> None:
        resolve(self)  # contradictions fail here, when the config is read


SIZES: dict[Size, tuple[int, int]] = {"tiny": (128, 2), "mini": (192, 4), "small": (256, 6), "base": (768, 12)}

ORIGINAL: dict[str, Any] = {
    "norm": "layer", "norm_place": "post", "norm_epsilon": 1e-5, "embedding_norm": False, "activation": "relu",
    "bias": True, "qk_norm": False, "tie_embeddings": True, "embedding_scale": True, "output_scale": False,
    "output_bias": False, "head_transform": False, "logit_soft_cap": 0.0, "dropout": 0.1, "attention_dropout": 0.1,
    "activation_dropout": 0.0, "position": "sinusoidal", "max_positions": 512, "relative_clip": 16,
    "position_buckets": 32, "position_distance": 128, "rotary_base": 10_000.0, "attention": "dot",
    "attention_scale": True, "attention_normalise": "softmax", "attention_rank": 64, "attention_window": 0,
    "prefix_attention": "causal", "initialisation": "xavier", "initial_deviation": 0.02, "zero_output": False,
    "cell": "lstm", "bidirectional": True, "alignment": "dot",
}  # fmt: skip
"""Vaswani et al. 2017; the other presets say how they differ from it."""

PRESETS: dict[Preset, dict[str, Any]] = {
    "original": ORIGINAL,
    "bert": ORIGINAL | {
        "norm_epsilon": 1e-12, "embedding_norm": True, "activation": "gelu", "embedding_scale": False,
        "output_bias": True, "head_transform": True, "position": "learned", "initialisation": "normal",
    },
    "gpt2": ORIGINAL | {
        "norm_place": "pre", "activation": "gelu_tanh", "embedding_scale": False, "position": "learned",
        "max_positions": 1024, "initialisation": "scaled",
    },
    "t5": ORIGINAL | {
        "norm": "rms", "norm_place": "pre", "norm_epsilon": 1e-6, "bias": False, "embedding_scale": False,
        "output_scale": True, "position": "t5", "attention_scale": False, "activation_dropout": 0.1,
        "initialisation": "normal",
    },
    "llama": ORIGINAL | {
        "norm": "rms", "norm_place": "pre", "norm_epsilon": 1e-5, "activation": "swiglu", "bias": False,
        "tie_embeddings": False, "embedding_scale": False, "dropout": 0.0, "attention_dropout": 0.0,
        "position": "rotary", "initialisation": "normal",
    },
    "modern-1": ORIGINAL | {
        "norm": "rms", "norm_place": "pre", "norm_epsilon": 1e-6, "activation": "relu_squared", "bias": False,
        "qk_norm": True, "embedding_scale": False, "dropout": 0.0, "attention_dropout": 0.0, "position": "rotary",
        "initialisation": "scaled", "zero_output": True,
    },
}  # fmt: skip
PRESETS["modern"] = PRESETS["modern-1"]  # the newest of its name; one that has a number never changes


def resolve(config: ModelConfig) -> Architecture:
    """Decide every setting: what is given, else what the preset says, else what follows from the size."""
    chosen = PRESETS[config.preset] | {name: value for name, value in asdict(config).items() if value is not None}
    for name in ("preset", "size", "layers"):
        chosen.pop(name, None)
    width, blocks = SIZES[config.size]
    width = chosen.setdefault("width", width)
    encoder_layers, decoder_layers = split_blocks(config.family, blocks if config.layers is None else config.layers)
    chosen.setdefault("encoder_layers", encoder_layers)
    chosen.setdefault("decoder_layers", decoder_layers)
    if "head_width" not in chosen:
        chosen["head_width"] = width // config.heads if config.heads else 32 if width < 256 else 64
    heads = chosen.setdefault("heads", max(1, width // max(1, chosen["head_width"])))
    chosen.setdefault("kv_heads", heads)
    chosen.setdefault("feed_forward", 4 * width)
    chosen.setdefault("position_width", width // 4)
    if chosen["position"] == "concatenated":
        chosen["tie_embeddings"] = False  # the two matrices differ in width
    if config.family == "recurrent" and config.position is None:
        chosen["position"] = "none"  # what the presets say of positions is for self-attention
    return Architecture(**chosen)


def split_blocks(family: Family, blocks: int) -> tuple[int, int]:
    """How many blocks the encoder and the decoder get."""
    if family in ("encoder-decoder", "recurrent"):
        return (blocks + 1) // 2, blocks // 2
    return (blocks, 0) if family == "encoder" else (0, blocks)


LARGEST, LARGEST_DEPTH = 2**24, 2**12  # beyond them a setting is a slip of the finger


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


def with_dropout(model: Architecture, settings: ModelConfig) -> Architecture:
    """A model with the dropout that settings name: what suits much text may not suit few rows."""
    named = {name: getattr(settings, name) for name in DROPOUTS if getattr(settings, name) is not None}
    return replace(model, **named)


def unused(model: Architecture, settings: ModelConfig) -> list[str]:
    """Settings that were given though the model, which comes from elsewhere, is another."""
    asked = resolve(settings)
    named = [one.name for one in fields(settings) if getattr(settings, one.name) != one.default]
    keys = {name: "width" if name == "size" else name for name in named if name not in ("family", "preset")}
    return [name for name, key in keys.items() if getattr(model, key) != getattr(asked, key)]
