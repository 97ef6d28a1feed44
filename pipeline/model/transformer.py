"""The three families: an encoder, a decoder, or both with a wire between them, all of the same blocks.

Shapes: B batch, T tokens (targets), S source tokens, C width, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import UserError
from pipeline.model.attention import Attention, LayerCache, Visible, visible
from pipeline.model.block import Block, FeedForward, make_norm
from pipeline.model.config import Architecture
from pipeline.model.cost import count_flops
from pipeline.model.fast import dropped
from pipeline.model.heads import ClassificationHead, LanguageHead
from pipeline.model.positions import Relative, check_length, make_positions


class Cache:
    """What a decoder has seen so far, in memory allocated once."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.blocks = [(LayerCache(capacity), LayerCache(capacity)) for _ in range(layers)]
        """Of each block its own tokens, and the context."""
        self.real_BS: Tensor | None = None

    @property
    def length(self) -> int:
        return self.blocks[0][0].length

    def extend_real(self, real_BT: Tensor | None, tokens: int) -> Tensor | None:
        """Note which of the new tokens are no padding and return that of all; None while none ever was padding."""
        if self.real_BS is None and real_BT is not None:
            self.real_BS = real_BT.new_ones(len(real_BT), self.length)
        if self.real_BS is not None:
            new = self.real_BS.new_ones(len(self.real_BS), tokens) if real_BT is None else real_BT
            self.real_BS = torch.cat([self.real_BS, new], dim=1)
        return self.real_BS

    def reorder(self, rows: Tensor) -> None:
        """Let row i go on from what row `rows[i]` has seen."""
        for own, context in self.blocks:
            own.reorder(rows)
            context.reorder(rows)
        if self.real_BS is not None:
            self.real_BS = self.real_BS.index_select(0, rows)


@dataclass(frozen=True)
class Memory:
    """What an encoder hands to a decoder."""

    states_BSC: Tensor
    real_BS: Tensor | None = None
    final_BC: Tensor | None = None
    """The last state of a recurrent encoder: all that passes when there is no attention."""

    def select(self, rows: Tensor) -> "Memory":
        """The memory of some rows, in their order; a row may come several times."""
        real, final = (part if part is None else part.index_select(0, rows) for part in (self.real_BS, self.final_BC))
        return Memory(self.states_BSC.index_select(0, rows), real, final)


@dataclass(frozen=True)
class Branches:
    """New tokens that are alternatives to each other, each going on from a past of its own in one cache.

    Nothing in the cache moves when beams are chosen anew, and they share the prompt and the memory.
    """

    positions_S: Tensor
    """Where all tokens of the cache stand, and then the new ones."""
    own_BTS: Tensor
    """Which of these each new token sees: its own past and itself, no padding."""


class Stack(nn.Module):
    """One side of a model: positions, blocks, and the norm that closes them."""

    def __init__(self, model: Architecture, layers: int, causal: bool, cross: bool) -> None:
        super().__init__()
        self.causal = causal
        self.window = model.attention_window
        self.recompute = False
        """Keep no activations inside blocks but compute them again in the backward pass."""
        self.positions = make_positions(model, layers, causal)
        self.embedding_norm = make_norm(model) if model.embedding_norm else nn.Identity()
        self.dropout = model.dropout
        self.blocks = nn.ModuleList(Block(model, causal, cross) for _ in range(layers))
        self.norm = nn.Identity() if model.norm_place == "post" else make_norm(model)

    def forward(
        self,
        x_BTC: Tensor,
        real_BT: Tensor | None = None,
        memory: Memory | None = None,
        prefix_B: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """Run the blocks. `real_BT` is true where a token is no padding.

        A causal stack needs it for padding on the left only: what stands on the right is never seen.
        """
        start, tokens = cache.length if cache else 0, x_BTC.shape[1]
        if branches is None:
            keys, own_BTS = torch.arange(start + tokens, device=x_BTC.device), None
            real_BS = cache.extend_real(real_BT, tokens) if cache else real_BT
            check_length(start + tokens, self.positions.limit)
        else:
            keys, own_BTS, real_BS = branches.positions_S, branches.own_BTS, None
        biases = self.positions.biases(len(self.blocks), keys[start:], keys)
        documents = None if documents_BT is None else (documents_BT, documents_BT)
        biased = biases[0] is not None
        seen = visible(keys[start:], keys, self.causal, real_BS, prefix_B, documents, self.window, biased, own_BTS)
        context_seen = Visible()
        if memory is not None and memory.real_BS is not None:
            context_seen = Visible(memory.real_BS[:, None, None, :], real_BS=memory.real_BS)
        places = keys[start:]
        if own_BTS is not None:
            places = own_BTS.sum(-1) - 1
        elif real_BS is not None:
            places = (real_BS.cumsum(1) - 1).clamp(min=0)[:, start:]
        positions = self.positions.at(keys[start:])
        x_BTC = dropped(self.embedding_norm(self.positions.embed(x_BTC, places)), self.dropout, self.training)
        context_BSC = memory.states_BSC if memory else None
        for number, block in enumerate(self.blocks):
            own_cache = cache.blocks[number] if cache else None
            arguments = (x_BTC, seen, positions, biases[number], context_BSC, context_seen, own_cache)
            again = self.recompute and torch.is_grad_enabled()
            x_BTC = checkpoint(block, *arguments, use_reentrant=False) if again else block(*arguments)
        return self.norm(x_BTC)


class LanguageModel(nn.Module):
    """What models of all families share: embeddings before the states, logits behind them."""

    def __init__(self, model: Architecture, vocab_size: int) -> None:
        super().__init__()
        self.architecture = model
        self.vocab_size = vocab_size
        word_width = model.width - (model.position_width if model.position == "concatenated" else 0)
        self.embedding = nn.Embedding(vocab_size, word_width)
        self.scale = math.sqrt(model.width) if model.embedding_scale else 1.0

    def complete(self) -> None:
        """Add what comes last, and give every parameter its first value."""
        self.head = LanguageHead(self.architecture, self.vocab_size)
        self.classifier: ClassificationHead | None = None
        if self.architecture.tie_embeddings:
            self.head.output.weight = self.embedding.weight
        initialise(self)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.scale

    def logits(self, states: Tensor) -> Tensor:
        """Scores of the vocabulary for states of any leading shape."""
        return self.head(states)


class Transformer(LanguageModel):
    """A model of any of the three families, from ids to states and logits."""

    def __init__(self, model: Architecture, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        cross = model.family == "encoder-decoder"
        self.encoder = Stack(model, model.encoder_layers, causal=False, cross=False) if model.encoder_layers else None
        self.decoder = Stack(model, model.decoder_layers, causal=True, cross=cross) if model.decoder_layers else None
        self.complete()

    def encode(self, ids_BS: Tensor, real_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> Memory:
        """States of a source that sees itself in full."""
        if self.encoder is None:
            raise UserError(f"a model of family {self.architecture.family} has no encoder")
        return Memory(self.encoder(self.embed(ids_BS), real_BS, documents_BT=documents_BS), real_BS)

    def decode(
        self,
        ids_BT: Tensor,
        real_BT: Tensor | None = None,
        memory: Memory | None = None,
        prefix_B: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """States of tokens each of which sees those before it, and the memory where there is one."""
        if self.decoder is None:
            raise UserError(f"a model of family {self.architecture.family} has no decoder")
        return self.decoder(self.embed(ids_BT), real_BT, memory, prefix_B, documents_BT, cache, branches)

    def training_flops(self, source: int, target: int, predicted: int) -> int:
        """Operations of training on a sequence."""
        return count_flops(self.architecture, self.vocab_size, source, target, predicted).training

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for so many tokens."""
        return Cache(self.architecture.decoder_layers, capacity)


# --- Initialisation ----------------------------------------------------------------------------------------------


def initialise(model: LanguageModel) -> None:
    """Give every parameter its first value, each exactly once."""
    done: set[int] = set()
    settings = model.architecture
    for module in model.modules():
        fresh = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in done]
        done.update(map(id, fresh))
        if fresh:
            initialise_module(module, settings)
    residual_deviation = settings.initial_deviation / math.sqrt(2 * max(1, settings.layers))
    for module in model.modules():
        if isinstance(module, Attention | FeedForward):
            if settings.zero_output:
                nn.init.zeros_(module.output.weight)
            elif settings.initialisation == "scaled":
                nn.init.normal_(module.output.weight, std=residual_deviation)
    assert done == {id(parameter) for parameter in model.parameters()}, "a parameter without a first value"


def initialise_module(module: nn.Module, settings: Architecture) -> None:
    match module:
        case nn.Linear() if settings.initialisation == "xavier":
            nn.init.xavier_uniform_(module.weight)
        case nn.Embedding() if settings.initialisation == "xavier":
            nn.init.normal_(module.weight, std=settings.width**-0.5)
        case nn.Linear() | nn.Embedding():
            nn.init.normal_(module.weight, std=settings.initial_deviation)
        case nn.RNNBase():
            initialise_cell(module)
        case nn.LayerNorm() | nn.RMSNorm():
            nn.init.ones_(module.weight)
        case Relative():
            nn.init.zeros_(module.table)
        case Attention():
            nn.init.normal_(module.key_mixer, std=settings.attention_rank**-0.5)
            nn.init.normal_(module.value_mixer, std=settings.attention_rank**-0.5)
        case _:
            raise TypeError(f"no first value is known for {type(module).__name__}")
    if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
        nn.init.zeros_(bias)


def initialise_cell(cell: nn.RNNBase) -> None:
    """Each gate by itself: inputs Xavier, recurrence orthogonal, biases zero, but an LSTM begins by remembering."""
    for name, parameter in cell.named_parameters():
        gates = parameter.detach().chunk(len(parameter) // cell.hidden_size)
        for gate in gates:
            if name.startswith("weight_ih"):
                nn.init.xavier_uniform_(gate)
            elif name.startswith("weight_hh"):
                nn.init.orthogonal_(gate)
            else:
                nn.init.zeros_(gate)
        if name.startswith("bias_ih") and isinstance(cell, nn.LSTM):
            nn.init.ones_(gates[1])  # torch's order: input, forget, cell, output
