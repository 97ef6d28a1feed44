"""The recurrent baseline: an encoder-decoder of RNN, GRU or LSTM layers, without attention or with Luong's.

Shapes: B batch, T tokens (targets), S source tokens, C width, L layers, P parts of a state (an LSTM has two: what it
shows and what it keeps).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipeline.errors import UserError
from pipeline.model.config import Architecture, Cell
from pipeline.model.positions import check_length, make_positions
from pipeline.model.transformer import Cache, LanguageModel, Memory

CELLS: dict[Cell, type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


class Recurrent(LanguageModel):
    """A recurrent encoder-decoder, from ids to states and logits; used like a transformer.

    The last state of the encoder's top layer starts every layer of the decoder. Attention is Luong's global one without
    input feeding: the decoder reads all tokens in one call, and attends from all of them at once.
    """

    def __init__(self, model: Architecture, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self.encoder = RecurrentStack(model, model.encoder_layers, model.bidirectional)
        self.decoder = RecurrentStack(model, model.decoder_layers, bidirectional=False)
        self.parts = 2 if model.cell == "lstm" else 1
        # Linear, because what an LSTM keeps has no bound.
        self.bridge = nn.Linear(self.parts * model.width, self.parts * model.decoder_layers * model.width, model.bias)
        self.attention = None if model.alignment == "none" else LuongAttention(model)
        self.complete()

    def encode(self, ids_BS: Tensor, real_BS: Tensor | None = None, documents_BS: Tensor | None = None) -> Memory:
        """States of a source, read in one direction or both, and the last of them."""
        refuse(documents_BS, "keep documents apart")
        states_BSC, state_PLBC = self.encoder(self.embed(ids_BS), real_BS)
        return Memory(states_BSC, real_BS, final_BC=state_PLBC[:, -1].transpose(0, 1).flatten(1))

    def decode(
        self,
        ids_BT: Tensor,
        real_BT: Tensor | None = None,
        memory: Memory | None = None,
        prefix_B: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """States of tokens read one after another, from the memory's last state, or from zeros where there is none."""
        refuse(prefix_B, "read a prefix both ways")
        refuse(documents_BT, "keep documents apart")
        states_BTC = self.read(ids_BT, real_BT, memory, cache)
        return states_BTC if memory is None or self.attention is None else self.attention(states_BTC, memory)

    def read(self, ids_BT: Tensor, real_BT: Tensor | None, memory: Memory | None, cache: Cache | None) -> Tensor:
        """States of the decoder's top layer, before attention."""
        assert cache is None or isinstance(cache, StateCache)
        state_PLBC = cache.state_PLBC if cache else None
        if state_PLBC is None and memory is not None:
            state_BPLC = self.bridge(memory.final_BC).unflatten(-1, (self.parts, -1, self.architecture.width))
            state_PLBC = state_BPLC.permute(1, 2, 0, 3)
        states_BTC, state_PLBC = self.decoder(self.embed(ids_BT), real_BT, state_PLBC, cache)
        if cache:
            cache.state_PLBC = state_PLBC
            cache.length += ids_BT.shape[1]
        return states_BTC

    def training_flops(self, source: int, target: int, predicted: int) -> int:
        """Operations of training on a sequence: of each part that reads, its numbers for every token."""
        encoder, decoder, bridge, attention = (
            sum(parameter.numel() for parameter in part.parameters()) if part else 0
            for part in (self.encoder.layers, self.decoder.layers, self.bridge, self.attention)
        )
        read = source * encoder + target * decoder
        if source:
            read += bridge + target * (attention + (2 * source * self.architecture.width if self.attention else 0))
        return 6 * (read + predicted * self.head.output.weight.numel())

    def new_cache(self, capacity: int) -> "StateCache":
        """An empty cache; a state has one size, so that any number of tokens fits."""
        return StateCache()


def refuse(argument: Tensor | None, what: str) -> None:
    if argument is not None:
        raise UserError(f"a model of family recurrent cannot {what}; use a transformer")


class StateCache(Cache):
    """What a recurrent decoder has read: one state, however many tokens."""

    length = 0

    def __init__(self) -> None:
        super().__init__(layers=0, capacity=0)
        self.state_PLBC: Tensor | None = None

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        if self.state_PLBC is not None:
            self.state_PLBC = self.state_PLBC.index_select(2, rows)


class RecurrentStack(nn.Module):
    """One side of a model: positions, and layers that skip padding wherever it stands."""

    def __init__(self, model: Architecture, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.positions = make_positions(model, layers, causal=not bidirectional)
        self.dropout = nn.Dropout(model.dropout)
        self.layers = nn.ModuleList(
            RecurrentLayer(model.cell, model.width, model.width, bidirectional, model.bias) for _ in range(layers)
        )

    def forward(
        self, x_BTC: Tensor, real_BT: Tensor | None, state_PLBC: Tensor | None = None, cache: StateCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read on from a state, or from zeros; return the states of all tokens and the last state of all layers."""
        start, tokens = cache.length if cache else 0, x_BTC.shape[1]
        real_BS = cache.extend_real(real_BT, tokens) if cache else real_BT
        check_length(start + tokens, self.positions.limit)
        places = torch.arange(start, start + tokens, device=x_BTC.device)
        if real_BS is not None:
            places = (real_BS.cumsum(1) - 1).clamp(min=0)[:, start:]
        x_BTC = self.dropout(self.positions.embed(x_BTC, places))
        if torch.is_autocast_enabled(x_BTC.device.type):  # torch's LSTM on the CPU fails if autocast is left to do it
            x_BTC = x_BTC.to(torch.get_autocast_dtype(x_BTC.device.type))
        lengths_B = None
        if real_BT is not None:  # tokens to the front; the packing counts them on the CPU, which waits for a GPU
            order_BT1 = real_BT.argsort(dim=1, descending=True, stable=True)[..., None]
            x_BTC = x_BTC.take_along_dim(order_BT1, dim=1)
            lengths_B = real_BT.sum(1).clamp(min=1).cpu()
        last = []
        for number, layer in enumerate(self.layers):
            x_BTC, state_PBC = layer(x_BTC, lengths_B, None if state_PLBC is None else state_PLBC[:, number])
            x_BTC = self.dropout(x_BTC)
            last.append(state_PBC)
        last_PLBC = torch.stack(last, dim=1)
        if real_BT is not None:
            x_BTC = x_BTC.take_along_dim(order_BT1.argsort(dim=1), dim=1)
            last_PLBC = torch.where(real_BT.any(1)[:, None], last_PLBC, 0.0 if state_PLBC is None else state_PLBC)
        return x_BTC, last_PLBC


class RecurrentLayer(nn.Module):
    """One layer of torch's own kernels, in one direction or, at half the width each, in both.

    Layers are stacked here and not by torch: on a GPU its dropout between layers ignores the seed after the first use.
    """

    def __init__(self, cell: Cell, input_width: int, width: int, bidirectional: bool, bias: bool) -> None:
        super().__init__()
        hidden = width // 2 if bidirectional else width
        self.cell = CELLS[cell](input_width, hidden, bias=bias, batch_first=True, bidirectional=bidirectional)

    def forward(
        self, x_BTC: Tensor, lengths_B: Tensor | None = None, state_PBC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """States of all tokens and the last state, after a state that a single direction may start from."""
        first: tuple[Tensor, ...] | Tensor | None = None
        if state_PBC is not None:
            parts = state_PBC[:, None].contiguous()
            first = tuple(parts) if isinstance(self.cell, nn.LSTM) else parts[0]
        if lengths_B is None:
            states_BTC, last = self.cell(x_BTC, first)
        else:
            packed = pack_padded_sequence(x_BTC, lengths_B, batch_first=True, enforce_sorted=False)
            packed, last = self.cell(packed, first)
            states_BTC, _ = pad_packed_sequence(packed, batch_first=True, total_length=x_BTC.shape[1])
        last = torch.stack(last) if isinstance(self.cell, nn.LSTM) else last[None]
        return states_BTC, last.transpose(1, 2).flatten(2)


class LuongAttention(nn.Module):
    """Every decoder state looks at all encoder states (Luong, Pham and Manning 2015)."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.location = model.alignment == "location"
        self.score: nn.Module = nn.Identity()
        if model.alignment != "dot":
            self.score = nn.Linear(model.width, model.max_positions if self.location else model.width, bias=False)
        self.combine = nn.Linear(2 * model.width, model.width, bias=False)

    def forward(self, states_BTC: Tensor, memory: Memory) -> Tensor:
        context_BTC = self.probabilities(states_BTC, memory) @ memory.states_BSC
        return torch.tanh(self.combine(torch.cat([context_BTC, states_BTC], dim=-1)))

    def probabilities(self, states_BTC: Tensor, memory: Memory) -> Tensor:
        """The weights (B, T, S) that `forward` with the same arguments gives to the encoder's states."""
        scores_BTS = self.score(states_BTC)
        if self.location:
            check_length(memory.states_BSC.shape[1], scores_BTS.shape[-1])
            scores_BTS = scores_BTS[..., : memory.states_BSC.shape[1]]
        else:
            scores_BTS = scores_BTS @ memory.states_BSC.transpose(1, 2)
        if memory.real_BS is not None:
            scores_BTS = scores_BTS.masked_fill(~memory.real_BS[:, None], -math.inf)
        return torch.nan_to_num(scores_BTS.softmax(-1))  # a source of padding alone gets zeros
