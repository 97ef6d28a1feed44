"""Optimizers and schedules, against formulas and libraries that share no code with them."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn

from pipeline.bundle import Model, make_model
from pipeline.model.config import ModelConfig, resolve
from pipeline.training import optim
from pipeline.training.config import OptimConfig
from pipeline.training.optim import Muon, make_optimizer, orthogonal, parameter_groups, rate_share, set_rate

SCHEDULES = ("cosine", "linear", "inverse_sqrt", "stable", "constant")


def shares(total: int, **settings: Any) -> list[float]:
    config = OptimConfig(**settings)
    return [rate_share(config, step, total) for step in range(total)]


def tiny(family: str, **settings: Any) -> Model:
    torch.manual_seed(0)
    config: Any = {"family": family, "size": "tiny", "width": 32} | settings
    return make_model(resolve(ModelConfig(**config)), 50)


def test_the_rate_follows_the_optimizer_unless_it_is_given() -> None:
    for given, expected in (({}, {False: 1e-3}), ({"name": "muon"}, {False: 1e-2, True: 0.02})):
        groups = parameter_groups(tiny("decoder"), OptimConfig(**given))  # type: ignore[arg-type]
        assert {group["muon"]: group["peak"] for group in groups} == expected
    named = parameter_groups(tiny("decoder"), OptimConfig(name="muon", lr=0.5))
    assert {group["peak"] for group in named} == {0.5, 0.02}


# --- Schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup_steps"), [(1, 100), (2, 1), (7, 3), (100, 10), (100, 0), (60, 1000)])
def test_every_step_learns_and_none_faster_than_the_highest_rate(schedule: str, total: int, warmup_steps: int) -> None:
    """The first warm-up step is above 0, the peak is reached, no step is above it, and the last still learns."""
    found = shares(total, schedule=schedule, warmup_steps=warmup_steps, final_share=0.0)
    assert min(found) > 0
    assert max(found) == pytest.approx(1.0)
    assert found.index(max(found)) == min(warmup_steps, total // 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warm_up_is_a_straight_line_from_one_step_to_the_peak(schedule: str) -> None:
    found = shares(50, schedule=schedule, warmup_steps=9)
    assert found[:10] == pytest.approx([number / 10 for number in range(1, 11)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warm_up_longer_than_half_the_run_is_half_the_run(schedule: str) -> None:
    assert shares(40, schedule=schedule, warmup_steps=39) == shares(40, schedule=schedule, warmup_steps=20)
    assert shares(40, schedule=schedule, warmup_steps=39)[20] == pytest.approx(1.0)


def cosine(step: int) -> float:
    return 0.1 + 0.9 * math.cos(math.pi / 2 * (step - 20) / 100) ** 2  # the half-angle form


def linear(step: int) -> float:
    return (0.1 * (step - 20) + 1.0 * (120 - step)) / 100


def stable(step: int) -> float:
    return 1.0 if step <= 95 else 1.0 - 0.9 * (step - 95) / 25  # the last quarter of the 100 steps after the warm-up


def inverse_sqrt(step: int) -> float:
    return math.sqrt(20 / step)


@pytest.mark.parametrize("shape", [cosine, linear, stable, inverse_sqrt])
def test_schedules_have_their_shapes(shape: Callable[[int], float]) -> None:
    """120 steps, the first 20 of which are the warm-up; a falling schedule ends where it was told to."""
    found = shares(120, schedule=shape.__name__, warmup_steps=20, final_share=0.1, decay_share=0.25)
    assert found[20:] == pytest.approx([shape(step) for step in range(20, 120)], abs=1e-9)
    assert found[20:] == sorted(found[20:], reverse=True)
    if shape is not inverse_sqrt:
        beyond = rate_share(OptimConfig(schedule=shape.__name__, warmup_steps=20), 120, 120)  # type: ignore[arg-type]
        assert beyond == pytest.approx(0.1)  # where it was heading when the run ended


def test_a_rate_is_a_function_of_the_step_alone() -> None:
    """Asked in another order, or again, the answers are the same: a resumed run needs no scheduler state."""
    config = OptimConfig(warmup_steps=5)
    forwards = [rate_share(config, step, 30) for step in range(30)]
    assert [rate_share(config, step, 30) for step in reversed(range(30))] == forwards[::-1]


def test_every_group_gets_its_share_of_its_own_highest_rate() -> None:
    optimizer = make_optimizer(tiny("decoder"), OptimConfig(name="muon", lr=0.001, muon_lr=0.02))
    assert {group["muon"] for group in optimizer.param_groups} == {True, False}
    for share in (0.5, 0.25, 1.0):  # not compounded
        set_rate(optimizer, share)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx((0.02 if group["muon"] else 0.001) * share)


# --- Groups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("encoder", "bert"),
        ("decoder", "gpt2"),
        ("encoder-decoder", "t5"),
        ("decoder", "modern"),
        ("recurrent", "original"),
    ],
)
def test_each_trained_weight_is_in_exactly_one_group(family: str, preset: str, name: str) -> None:
    """Vectors are never decayed, a tied embedding comes once, Muon gets the matrices of the blocks and nothing else."""
    model = tiny(family, preset=preset)
    frozen = next(parameter for parameter in model.parameters() if parameter.dim() == 1)
    frozen.requires_grad_(False)
    groups = parameter_groups(model, OptimConfig(name=name, weight_decay=0.3))  # type: ignore[arg-type]
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in model.parameters()} - {id(frozen)}
    assert model.head.output.weight is model.embedding.weight  # tied, in all of these
    assert held.count(id(model.embedding.weight)) == 1
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.3 if parameter.dim() > 1 else 0.0)
            inside = parameter.dim() == 2 and "blocks" in names[id(parameter)].split(".")
            assert group["muon"] == (inside and name == "muon")
    assert any(group["muon"] for group in groups) == (name == "muon" and family != "recurrent")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_pulls_matrices_and_leaves_vectors(name: str) -> None:
    """With gradients of zero only decay acts."""
    model = tiny("decoder", preset="gpt2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config: Any = {"name": name, "lr": 0.1, "muon_lr": 0.1, "weight_decay": 0.5}
    optimizer = make_optimizer(model, OptimConfig(**config))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), before[key] * (0.95 if value.dim() > 1 else 1.0))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gradients_are_clipped_without_their_scale(name: str) -> None:
    """Lightning takes the scale of 16-mixed off before, and refuses to clip where the optimizer would do so after."""
    optimizer = make_optimizer(tiny("decoder"), OptimConfig(name=name), "16-mixed")  # type: ignore[arg-type]
    MixedPrecision("16-mixed", "cpu").clip_gradients(optimizer, 1.0)
    assert make_optimizer(tiny("decoder"), OptimConfig(), "bf16-mixed").defaults["fused"]


# --- Muon --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(96, 24), (24, 96), (48, 48), (1, 16)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_orthogonal_makes_all_singular_values_about_one(rows: int, columns: int, size: float) -> None:
    """Within the band of the quintic iteration (Jordan et al.), with the singular vectors left as they were."""
    torch.manual_seed(1)
    matrix = torch.randn(rows, columns)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values.clamp(min=0.1 * float(values.max()))  # the iteration does not reach values close to 0
    found = orthogonal((left @ values.diag() @ right * size)[None], 5)[0]
    assert found.shape == matrix.shape
    inside = left.T @ found @ right.T
    assert (inside.diag() - 1).abs().max() < 0.35
    assert (inside - inside.diag().diag()).abs().max() < 1e-4


@pytest.mark.parametrize(("rows", "columns"), [(96, 24), (24, 96), (48, 48), (1, 16)])
def test_many_matrices_are_orthogonal_as_one_alone(rows: int, columns: int) -> None:
    """The iteration as it is written, for a matrix of full and of low rank, beside all of them at once."""
    torch.manual_seed(1)
    low = torch.randn(rows, 1) @ torch.randn(1, columns)
    matrices = torch.stack([torch.randn(rows, columns), 1e-3 * torch.randn(rows, columns), low])
    for found, matrix in zip(orthogonal(matrices, 5), matrices, strict=True):
        x = (matrix / matrix.norm()).double()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        torch.testing.assert_close(found.double(), x, rtol=0, atol=6e-5)  # 3.4445⁵ times the rounding of float32


@pytest.mark.parametrize(("rows", "columns"), [(96, 24), (24, 96), (48, 48)])
def test_16_bits_are_enough_to_be_about_orthogonal(rows: int, columns: int) -> None:
    """In mixed precision the update has the direction and the size of the one in full precision."""
    torch.manual_seed(1)
    matrix = torch.randn(1, rows, columns)
    narrow, wide = orthogonal(matrix, 5, narrow=True), orthogonal(matrix, 5)
    assert narrow.dtype == torch.float32 and not torch.equal(narrow, wide)
    assert float((narrow - wide).norm() / wide.norm()) < 0.05
    for precision, expected in (("32", False), ("bf16-mixed", True)):
        optimizer = make_optimizer(tiny("decoder"), OptimConfig(name="muon"), precision)  # type: ignore[arg-type]
        assert isinstance(optimizer, Muon) and optimizer.narrow is expected


@pytest.mark.parametrize("together", [1, 100, 10**6])
def test_muon_does_not_depend_on_what_it_computes_together(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "TOGETHER", together)
    torch.manual_seed(3)
    start = [torch.randn(shape) for shape in ((8, 4), (4, 4), (8, 4), (8, 4))]
    goals = [torch.randn_like(tensor) for tensor in start]
    ways = []
    for apart in (False, True):
        parameters = [nn.Parameter(tensor.clone()) for tensor in start]
        for group in [[one] for one in parameters] if apart else [parameters]:
            of_group = [goals[next(n for n, one in enumerate(parameters) if one is two)] for two in group]
            given = {"params": group, "lr": 0.02, "weight_decay": 0.5, "muon": True}
            train(Muon([given], betas=(0.9, 0.95), eps=1e-8), group, of_group, 3)
        ways.append(parameters)
    for one, other, first in zip(*ways, start, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert (one - first).abs().max() > 1e-3


def quadratic(parameters: Sequence[Tensor], goals: list[Tensor]) -> Tensor:
    return sum(
        (((parameter - goal) ** 2).sum() for parameter, goal in zip(parameters, goals, strict=True)), torch.zeros(())
    )


def train(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], goals: list[Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        quadratic(parameters, goals).backward()
        optimizer.step()


def test_the_adamw_part_of_muon_is_adamw() -> None:
    """Ten steps with decay; a weight without a gradient stays as it is in both."""
    torch.manual_seed(2)
    start = [torch.randn(5, 3), torch.randn(7), torch.randn(4)]
    goals = [torch.randn_like(tensor) for tensor in start]
    results = []
    for kind in ("muon", "adamw"):
        parameters = [nn.Parameter(tensor.clone()) for tensor in start]
        groups: list[dict[str, Any]] = [
            {"params": parameters[:1], "lr": 0.01, "weight_decay": 0.1, "muon": False},
            {"params": parameters[1:], "lr": 0.03, "weight_decay": 0.0, "muon": False},
        ]
        optimizer: torch.optim.Optimizer
        if kind == "muon":
            optimizer = Muon(groups, betas=(0.9, 0.95), eps=1e-8)
        else:
            optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        train(optimizer, parameters[:2], goals[:2], 10)
        results.append([parameter.detach() for parameter in parameters])
    for one, other, first in zip(*results, start, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
        assert torch.equal(one, first) == (len(first) == 4)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (32, 32)])
def test_muon_steps_as_the_librarys(shape: tuple[int, int]) -> None:
    """To bfloat16's digits, in which torch.optim.Muon works; decay, momentum and scale are in it."""
    torch.manual_seed(3)
    start, goal = torch.randn(shape), torch.randn(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    own = Muon([{"params": [ours], "lr": 0.02, "weight_decay": 0.5, "muon": True}], betas=(0.9, 0.95), eps=1e-8)
    library = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.5, momentum=0.95, nesterov=True)
    for _ in range(3):
        before = ours.detach().clone()
        train(own, [ours], [goal], 1)
        train(library, [theirs], [goal], 1)
        moved = float((ours.detach() - before).norm())
        assert float((ours.detach() - theirs.detach()).norm()) < 0.03 * moved
        theirs.data.copy_(ours.detach())  # rounding errors should not add up


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_of_an_optimizer_can_be_saved_and_loaded(name: str) -> None:
    """Five steps, or three, a save, a load into a fresh optimizer, and two: the same weights to the last bit."""

    def made() -> tuple[Model, torch.optim.Optimizer, list[Tensor]]:
        model = tiny("decoder")
        optimizer = make_optimizer(model, OptimConfig(name=name))  # type: ignore[arg-type]
        return model, optimizer, list(model.parameters())

    model, optimizer, parameters = made()
    torch.manual_seed(4)
    goals = [torch.randn_like(parameter) for parameter in parameters]
    train(optimizer, parameters, goals, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(optimizer, parameters, goals, 2)

    again, fresh, others = made()
    again.load_state_dict(weights)
    fresh.load_state_dict(state)
    train(fresh, others, goals, 2)
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(one, other)
