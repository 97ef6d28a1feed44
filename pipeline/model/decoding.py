"""A model that writes: sequences under way, each a row of its cache, or alternatives that share one.

Shapes: B prompts, N sequences under way of each, T tokens of a prompt, S tokens in a cache, C width, V vocabulary.
"""

import torch
from torch import Tensor

from pipeline.bundle import Model
from pipeline.model.transformer import Branches, Memory, Transformer

TIDIED_EVERY = 16  # steps of a beam search: it copies the cache


class Decoding:
    """Sequences under way with any model, each a row of its cache."""

    def __init__(self, model: Model, memory: Memory | None) -> None:
        self.model, self.memory = model, memory

    def prompt(self, ids_BT: Tensor, real_BT: Tensor | None, room: int) -> Tensor:
        """Read the prompts and return the logits (B, V) of what follows; keep room for so many tokens more."""
        prefix_B = None
        if self.model.architecture.family == "decoder" and self.model.architecture.prefix_attention == "bidirectional":
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

    Selecting costs a mask instead of a copy of the cache; each sequence reads past what its siblings wrote, until what
    nobody goes on from is tidied away.
    """

    def prompt(self, ids_BT: Tensor, real_BT: Tensor | None, room: int) -> Tensor:
        self.position = self.tidied = ids_BT.shape[1]
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
        beams = ids_BN.shape[1]
        if self.cache.length - self.tidied >= TIDIED_EVERY * beams:
            self.tidy()
        start = self.cache.length
        new = slice(start, start + beams)
        self.own_BNS[..., new] = torch.eye(beams, dtype=torch.bool, device=ids_BN.device)
        self.positions_S[new] = self.position
        self.position += 1
        branches = Branches(self.positions_S[: new.stop], self.own_BNS[..., : new.stop])
        states_BNC = self.model.decode(ids_BN, memory=self.memory, cache=self.cache, branches=branches)
        return self.model.logits(states_BNC).float()

    def tidy(self) -> None:
        """Leave out of the cache what no sequence goes on from, which is most of what was tried."""
        length = self.cache.length
        dead_BS = ~self.own_BNS[..., :length].any(1)
        # Those of one position stay together, the living first, so that all prompts keep the same positions.
        order_BS = (2 * self.positions_S[:length] + dead_BS).argsort(dim=1, stable=True)
        needed_S = ~dead_BS.gather(1, order_BS).all(0)
        kept_BS = order_BS[:, needed_S]
        for own, _ in self.cache.blocks:
            own.keep_only(kept_BS)
        self.tidied = self.cache.length
        self.own_BNS[..., : self.tidied] = self.own_BNS.take_along_dim(kept_BS[:, None], dim=2)
        self.own_BNS[..., self.tidied :] = False
        self.positions_S[: self.tidied] = self.positions_S[:length][needed_S]
