"""The recurrent family: torch's cells, Luong's attention, and the invariances that every family keeps.

Ids: 0 padding, 1 begin, 2 end, the rest words.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pipeline.errors import UserError
from pipeline.model.attention import attention_probabilities
from pipeline.model.config import Alignment, ModelConfig, resolve
from pipeline.model.recurrent import CELLS, LuongAttention, Recurrent, RecurrentLayer
from pipeline.model.transformer import Memory

VOCABULARY, WIDTH = 11, 8
ALIGNMENTS: list[Alignment] = ["none", "dot", "general", "location"]
each_cell = pytest.mark.parametrize("cell", CELLS)
each_alignment = pytest.mark.parametrize("alignment", ALIGNMENTS)
each_direction = pytest.mark.parametrize("bidirectional", [False, True])


def model(**changes: Any) -> Recurrent:
    """A small model whose every bias is drawn too, so that none can hide behind its zero."""
    plain = {"width": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, "max_positions": 12}
    torch.manual_seed(1)
    made = Recurrent(
        resolve(ModelConfig(**{"family": "recurrent", "preset": "original"} | plain | changes)), VOCABULARY
    )
    for name, parameter in made.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return made.eval()


def cells(module: nn.Module) -> list[nn.RNNBase]:
    return [part for part in module.modules() if isinstance(part, nn.RNNBase)]


def words(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


def padded(ids: Tensor, left: int = 0, right: int = 0) -> tuple[Tensor, Tensor]:
    return F.pad(ids, (left, right)), F.pad(torch.ones_like(ids), (left, right)).bool()


# --- The cells -------------------------------------------------------------------------------------------------------


@each_cell
@each_direction
def test_stacked_layers_are_torchs_own(cell: str, bidirectional: bool) -> None:
    encoder = model(cell=cell, bidirectional=bidirectional, position="none").encoder
    width = WIDTH // 2 if bidirectional else WIDTH
    peer = getattr(nn, cell.upper())(WIDTH, width, num_layers=2, batch_first=True, bidirectional=bidirectional)
    for number, ours in enumerate(cells(encoder)):
        for name, parameter in ours.named_parameters():
            peer.get_parameter(name.replace("_l0", f"_l{number}")).data.copy_(parameter.data)
    x = torch.randn(3, 5, WIDTH)
    states, state = encoder(x, None)
    expected, last = peer(x)
    assert_close(states, expected)
    parts = last if cell == "lstm" else (last,)
    for top, theirs in zip(state[:, -1], parts, strict=True):
        assert_close(top, torch.cat(list(theirs.view(2, -1, 3, width)[-1]), dim=-1))


def test_first_values() -> None:
    torch.manual_seed(0)
    made = Recurrent(resolve(ModelConfig(family="recurrent", preset="original", width=WIDTH, layers=2)), VOCABULARY)
    for cell in cells(made):
        for name, parameter in cell.named_parameters():
            gates = parameter.view(4, cell.hidden_size, -1)
            if name.startswith("weight_hh"):
                assert_close(gates @ gates.mT, torch.eye(cell.hidden_size).expand_as(gates))
            elif name.startswith("bias"):
                expected = torch.tensor([0.0, 1.0 if name.startswith("bias_ih") else 0.0, 0.0, 0.0])
                assert torch.equal(gates, expected[:, None, None].expand_as(gates))
    assert made.head.output.weight is made.embedding.weight


def test_gradients_of_an_identity_rnn_have_the_closed_form() -> None:
    """Three inputs, four states, two outputs. Near zero tanh is the identity: inputs of size ε, read out by 1/ε, make
    our cell the linear one up to ε², and leave the gradient of the recurrent weights as it is."""
    tiny = 1e-6
    torch.manual_seed(3)
    layer = RecurrentLayer("rnn", 3, 4, bidirectional=False, bias=False).double()
    w_hx, w_hh = layer.get_parameter("cell.weight_ih_l0"), layer.get_parameter("cell.weight_hh_l0")
    x, w_yh, y = torch.randn(3, 3).double(), torch.randn(2, 4).double(), torch.eye(2).double()[[0, 1, 0]]
    states, _ = layer(tiny * x[None])
    F.cross_entropy(states[0] @ w_yh.T / tiny, y, reduction="sum").backward()

    h = [torch.zeros(4).double()]
    expected = torch.zeros(4, 4).double()
    with torch.no_grad():
        for t in (1, 2, 3):
            h.append(w_hh @ h[t - 1] + w_hx @ x[t - 1])
            g_o = (w_yh @ h[t]).softmax(0) - y[t - 1]
            for i in range(1, t + 1):
                g_h = torch.linalg.matrix_power(w_hh.T, t - i) @ w_yh.T @ g_o
                expected += torch.outer(g_h, h[i - 1])
    assert_close(w_hh.grad, expected, rtol=1e-9, atol=1e-12)


# --- Padding, batches and caches -------------------------------------------------------------------------------------


@each_cell
@each_direction
@each_alignment
def test_padding_and_company_change_nothing(cell: str, bidirectional: bool, alignment: str) -> None:
    made = model(cell=cell, bidirectional=bidirectional, alignment=alignment)
    source, target = words(1, 4), words(1, 3)
    alone = made.decode(target, memory=made.encode(source))
    ids, real = padded(source, right=3)
    company = made.encode(torch.cat([ids, words(2, 7)]), torch.cat([real, torch.ones(2, 7).bool()]))
    target_ids, target_real = padded(target, left=2)
    together = made.decode(
        torch.cat([target_ids, words(2, 5)]), torch.cat([target_real, torch.ones(2, 5).bool()]), company
    )
    assert_close(together[:1, 2:], alone)


@pytest.mark.parametrize("position", ["none", "sinusoidal", "learned", "concatenated"])
@pytest.mark.parametrize("padding", [0, 3])
@each_cell
def test_cached_is_uncached(cell: str, padding: int, position: str) -> None:
    """In pieces; with padding, the first piece is nothing else for one row."""
    made = model(cell=cell, position=position)
    memory, ids, real = made.encode(words(2, 6)), words(2, 7), torch.ones(2, 7).bool()
    real[0, :padding] = False
    cache = made.new_cache(7)
    pieces = []
    for start, end in ((0, 2), (2, 4), (4, 5), (5, 6), (6, 7)):
        assert cache.length == start
        given = real[:, start:end] if start < padding else None
        pieces.append(made.decode(ids[:, start:end], given, memory, cache=cache))
    assert_close(torch.cat(pieces, dim=1)[real], made.decode(ids, real, memory)[real])


@each_cell
def test_a_reordered_cache_goes_on_from_other_rows(cell: str) -> None:
    made = model(cell=cell, position="learned")
    rows = torch.tensor([1, 1, 0])
    ids, real = words(2, 4), torch.tensor([[False, True, True, True], [True, True, True, True]])
    memory = made.encode(words(2, 5))
    assert memory.final_BC is not None
    chosen = Memory(memory.states_BSC[rows], None, memory.final_BC[rows])
    cache = made.new_cache(5)
    cache.reorder(rows)  # nothing yet to reorder
    made.decode(ids, real, memory, cache=cache)
    cache.reorder(rows)
    newest = words(3, 1)
    whole = made.decode(torch.cat([ids[rows], newest], 1), F.pad(real[rows], (0, 1), value=True), chosen)
    assert_close(made.decode(newest, None, chosen, cache=cache), whole[:, -1:])


def alignments(made: Recurrent, target: Tensor, memory: Memory) -> Tensor:
    """How much each target token attends to each source token."""
    found = attention_probabilities(made, lambda: made.decode(target, memory=memory))
    return found["attention"]


def test_a_source_of_padding_alone_is_no_nan() -> None:
    made = model()
    memory = made.encode(torch.zeros(2, 3).long(), torch.tensor([[False] * 3, [True] * 3]))
    states = made.decode(words(2, 4), memory=memory)
    states.sum().backward()
    assert memory.final_BC is not None and not memory.final_BC[0].any()
    assert not alignments(made, words(2, 4), memory)[0].any()
    assert states.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


@each_cell
def test_half_precision_is_close(cell: str) -> None:
    made = model(cell=cell)
    source, real = padded(words(2, 4), right=2)
    exact = made.decode(words(2, 5), memory=made.encode(source, real))
    with torch.autocast("cpu", torch.bfloat16):
        memory, cache = made.encode(source, real), made.new_cache(5)
        pieces = [made.decode(ids, memory=memory, cache=cache) for ids in words(2, 5).split(3, dim=1)]
    half = torch.cat(pieces, dim=1)
    half.sum().backward()
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), exact, rtol=0, atol=0.05)


def test_dropout_is_off_in_evaluation_and_follows_the_seed_in_training() -> None:
    made = model(dropout=0.5)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return made.decode(words(2, 4), memory=made.encode(words(2, 5)))

    assert torch.equal(run(0), run(1))
    made.train()
    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))
    assert (made.encode(words(2, 5)).states_BSC == 0).any()


# --- What reaches what -----------------------------------------------------------------------------------------------


@each_alignment
def test_the_future_does_not_leak(alignment: str) -> None:
    made = model(alignment=alignment)
    target = words(1, 5)
    memory = made.encode(words(1, 4))
    changed = target.clone()
    changed[0, 3] = 1
    before, after = made.decode(target, memory=memory), made.decode(changed, memory=memory)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all(-1).any()


@each_alignment
def test_without_attention_only_the_last_state_passes(alignment: str) -> None:
    made = model(alignment=alignment)
    encoded = made.encode(words(1, 6))
    assert encoded.final_BC is not None
    states, final = encoded.states_BSC.detach().requires_grad_(), encoded.final_BC.detach().requires_grad_()
    made.decode(words(1, 3), memory=Memory(states, None, final)).square().sum().backward()
    assert final.grad is not None and (final.grad != 0).all()
    assert states.grad is None if alignment == "none" else states.grad is not None and (states.grad != 0).all()


@each_cell
@each_direction
@each_alignment
def test_every_parameter_learns(cell: str, bidirectional: bool, alignment: str) -> None:
    made = model(cell=cell, bidirectional=bidirectional, alignment=alignment, position="learned", tie_embeddings=False)
    made.logits(made.decode(words(2, 4), memory=made.encode(words(2, 5)))).square().sum().backward()
    assert [name for name, p in made.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_last_state_starts_the_decoder_through_the_bridge() -> None:
    made = model(cell="lstm", decoder_layers=1, alignment="none", position="none")
    memory, ids = made.encode(words(2, 3)), words(2, 5)
    shown, kept = made.bridge(memory.final_BC).chunk(2, dim=-1)
    expected, _ = cells(made.decoder)[0](made.embedding(ids) * made.scale, (shown[None], kept[None]))
    assert_close(made.decode(ids, memory=memory), expected)


def test_a_decoder_alone_starts_from_zeros_and_does_not_attend() -> None:
    made = model(cell="gru", decoder_layers=1, position="none")
    ids = words(2, 5)
    expected, _ = cells(made.decoder)[0](made.embedding(ids) * made.scale)
    assert_close(made.decode(ids), expected)
    made.decode(ids).sum().backward()
    unused = ("encoder.", "bridge.", "attention.")
    assert all((p.grad is None) == name.startswith(unused) for name, p in made.named_parameters() if "head" not in name)


# --- Attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alignment", "score", "weights"),
    [
        ("dot", None, [0.25, 0.75]),
        ("general", [[0.0, 0.0], [1.0, 0.0]], [0.9, 0.1]),
        ("location", [[math.log(2), 0.0], [math.log(8), 0.0]], [0.2, 0.8]),
    ],
)
def test_attention_by_hand(alignment: str, score: list[list[float]] | None, weights: list[float]) -> None:
    """From s = (1, 0) to two encoder states: scores 0 and ln 3, ln 9 and 0, ln 2 and ln 8."""
    attention = LuongAttention(model(alignment=alignment, width=2, max_positions=2).architecture)
    if score is not None:
        attention.score.get_parameter("weight").data.copy_(torch.tensor(score))
    attention.combine.weight.data.copy_(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 0.0]]))
    s, h = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, math.log(9)], [math.log(3), 0.0]]])
    assert_close(attention.probabilities(s, Memory(h)), torch.tensor([[weights]]))
    expected = [math.tanh(weights[1] * math.log(3)), math.tanh(weights[0] * math.log(9) + 2.0)]
    assert_close(attention(s, Memory(h)), torch.tensor([[expected]]))


@pytest.mark.parametrize("alignment", ALIGNMENTS[1:])
def test_alignments_are_the_weights_used_and_leave_padding_out(alignment: str) -> None:
    made = model(alignment=alignment)
    ids, real = padded(words(2, 4), right=3)
    memory, target = made.encode(ids, real), words(2, 5)
    weights = alignments(made, target, memory)
    assert weights.shape == (2, 5, 7) and not weights[..., 4:].any() and (weights[..., :4] > 0).all()
    assert_close(weights.sum(-1), torch.ones(2, 5))
    s = made.read(target, None, memory, None)
    combine = made.get_parameter("attention.combine.weight")
    expected = torch.tanh(torch.cat([weights @ memory.states_BSC, s], dim=-1) @ combine.T)
    assert_close(made.decode(target, memory=memory), expected)


def test_what_cannot_be_done_is_said() -> None:
    made = model(alignment="location", max_positions=4, position="none")
    with pytest.raises(UserError, match="a sequence of 5 tokens, but the model has 4 positions"):
        made.decode(words(1, 2), memory=made.encode(words(1, 5)))
    with pytest.raises(UserError, match="family recurrent cannot read a prefix both ways"):
        made.decode(words(1, 2), prefix_B=torch.ones(1))
    with pytest.raises(UserError, match="family recurrent cannot keep documents apart"):
        made.decode(words(1, 2), documents_BT=torch.ones(1, 2))
    with pytest.raises(UserError, match="family recurrent cannot keep documents apart"):
        made.encode(words(1, 2), documents_BS=torch.ones(1, 2))


# --- A task: reverse up to six of four letters -----------------------------------------------------------------------


def reversals(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Source, where it is real, and target with its end."""
    lengths, at = torch.randint(1, 7, (rows, 1), generator=generator), torch.arange(7)
    source = torch.randint(3, 7, (rows, 7), generator=generator) * (at < lengths)
    target = source.gather(1, (lengths - 1 - at).clamp(min=0)) * (at < lengths) + 2 * (at == lengths)
    return source[:, :6], (at < lengths)[:, :6], target


def exact_match_after_training(alignment: Alignment, steps: int = 200) -> float:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    small: dict[str, Any] = {"width": 24, "layers": 2, "dropout": 0.0, "position": "none", "bidirectional": False}
    config = ModelConfig(family="recurrent", preset="original", alignment=alignment, **small)
    made = Recurrent(resolve(config), vocab_size=7)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        source, real, target = reversals(64, generator)
        states = made.decode(F.pad(target, (1, -1), value=1), memory=made.encode(source, real))
        F.cross_entropy(made.logits(states).mT, target, ignore_index=0).backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    source, real, target = reversals(512, generator)
    with torch.no_grad():
        memory, cache, token, produced = made.encode(source, real), made.new_cache(7), torch.ones(512, 1).long(), []
        for _ in range(7):
            token = made.logits(made.decode(token, memory=memory, cache=cache)).argmax(-1)
            produced.append(token)
    return ((torch.cat(produced, 1) == target) | (target == 0)).all(1).float().mean().item()


def test_reversal_is_learned_and_attention_helps() -> None:
    attentive, bottleneck = exact_match_after_training("dot"), exact_match_after_training("none")
    assert attentive > 0.95
    assert attentive > bottleneck + 0.02
