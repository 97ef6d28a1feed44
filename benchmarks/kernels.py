"""What our own kernels and kept memory gain, each beside the way of torch that it replaces.

    python -m benchmarks.kernels --rounds 15

Norms and activations forward and backward for 16 × 256 states, or without gradients for one token; the step is that of
the encoder of benchmarks/training.py. Each way in a process of its own, in turn.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import training
from benchmarks.harness import Step, Worker, arguments_of, in_turn, save
from pipeline.model.fast import Normalised, RMSNorm, keep_freed_memory, squared_relu
from pipeline.terminal import print_table

WIDTH, REPEATS = 256, 100


def both_ways(operation: Callable[[Tensor], Tensor], width: int) -> Step:
    """Forward and backward."""
    x = torch.randn(16, 256, width, requires_grad=True)
    gradient = torch.randn_like(x)
    return lambda: operation(x).backward(gradient)


def one_token(operation: Callable[[Tensor], Tensor]) -> Step:
    """Without gradients, many times."""
    x = torch.randn(1, 1, WIDTH)

    @torch.inference_mode()
    def step() -> None:
        for _ in range(REPEATS):
            operation(x)

    return step


def function_of_autograd() -> Callable[[Tensor], Tensor]:
    weight = torch.ones(WIDTH)
    return lambda x: Normalised.apply(x, weight, 1e-6)


def encoder_step(kept: bool) -> Step:
    case = next(case for case in training.CASES if case.family == "encoder" and not case.dropout)
    return training.make_step(training.our_model(case), training.make_batch(case.family), compiled=False, kept=kept)


def kept(step: Step) -> Step:
    keep_freed_memory()
    return step


KERNELS: dict[str, dict[str, Callable[[], Step]]] = {
    "norm": {
        "ours": lambda: kept(both_ways(RMSNorm(WIDTH, 1e-6), WIDTH)),
        "torch's RMSNorm": lambda: kept(both_ways(nn.RMSNorm(WIDTH, 1e-6), WIDTH)),
        "torch's LayerNorm": lambda: kept(both_ways(nn.LayerNorm(WIDTH, bias=False), WIDTH)),
    },
    "norm of one token, 100 times": {
        "ours": lambda: one_token(RMSNorm(WIDTH, 1e-6)),
        "as autograd's function": lambda: one_token(function_of_autograd()),
        "torch's RMSNorm": lambda: one_token(nn.RMSNorm(WIDTH, 1e-6)),
    },
    "squared ReLU": {
        "ours": lambda: kept(both_ways(squared_relu, 4 * WIDTH)),
        "relu, square": lambda: kept(both_ways(lambda x: F.relu(x).square(), 4 * WIDTH)),
    },
    "encoder's step": {
        "freed memory kept": lambda: encoder_step(True),
        "given back": lambda: encoder_step(False),
    },
}


def prepare(kernel: str, way: str) -> Callable[[], Step]:
    return KERNELS[kernel][way]


def main() -> None:
    parser = arguments_of("kernels", __doc__, data=False)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    rows = []
    for kernel, ways in KERNELS.items():
        answers = in_turn({way: Worker(partial(prepare, kernel, way)) for way in ways}, arguments.rounds)
        times = {way: [1e3 * answer[way]["seconds"] for answer in answers] for way in ways}
        ours = median(times[next(iter(ways))])
        rows += [(kernel, way, median(all_), min(all_), max(all_), median(all_) / ours) for way, all_ in times.items()]
    header = ("what", "way", "ms", "least", "most", "to ours")
    print_table(f"torch {torch.__version__}, {torch.get_num_threads()} threads", header, rows)
    save(arguments.json, {"torch": torch.__version__, "header": header, "rows": rows})


if __name__ == "__main__":
    main()
