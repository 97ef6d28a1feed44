"""What our own kernels and kept memory gain, each beside the way of torch that it replaces.

    python -m benchmarks.kernels --rounds 15

Layers, norms, activations, dropout and attention forward and backward for 16 × 256 states (attention of short
sequences: 120 of 17 tokens), the loss of 2,048 states over 8,192 words, or without gradients for new tokens; steps are
those of benchmarks/training.py, with AdamW. Each way in a process of its own, in turn.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import training
from benchmarks.harness import Step, Worker, arguments_of, in_turn, save
from pipeline.model import products
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.fast import Normalised, RMSNorm, attend, dropped, keep_freed_memory, squared_relu
from pipeline.model.heads import LOSS_CHUNK, LanguageHead
from pipeline.model.products import Linear
from pipeline.terminal import print_table

WIDTH, REPEATS = 256, 100


def both_ways(operation: Callable[[Tensor], Tensor], width: int) -> Step:
    """Forward and backward."""
    x = torch.randn(16, 256, width, requires_grad=True)
    gradient = torch.randn_like(operation(x))
    return lambda: operation(x).backward(gradient)


def attention(
    way: Callable[..., Tensor], sequences: int, tokens: int, dtype: torch.dtype, dropout: float = 0.0
) -> Step:
    """Four heads over padded sequences, forward and backward."""
    q, k, v = (torch.randn(sequences, tokens, 4, 64, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    gradient, real = torch.randn_like(q), torch.ones(sequences, 1, 1, tokens, dtype=torch.bool)
    return lambda: way(q, k, v, real, dropout).backward(gradient)


def by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    return attend(q, k, v, mask, dropout, False, 0.125)


def torchs_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, dropout)


def layer(onednn: bool) -> Step:
    """A layer of the feed-forward network, by oneDNN or by what torch takes, whatever the processor."""
    products.onednn_is_ahead = lambda: onednn  # type: ignore[assignment]
    return both_ways(Linear(WIDTH, 4 * WIDTH, bias=False), WIDTH)


def loss(ours: bool, mixed: bool, smoothing: float = 0.0) -> Step:
    """What an output matrix and cross entropy take, forward and backward."""
    head = LanguageHead(resolve(ModelConfig(family="decoder", size="small")), 8192)
    states, targets = torch.randn(2048, WIDTH, requires_grad=True), torch.randint(0, 8192, (2048,))
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=LOSS_CHUNK)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            if ours:
                found = head.loss(states, targets, smoothing)
            elif smoothing or mixed:
                found = F.cross_entropy(head(states).float(), targets, reduction="sum", label_smoothing=smoothing)
            else:
                found = F.linear_cross_entropy(states, head.output.weight, targets, reduction="sum", options=options)
        found.backward()

    return step


def one_token(operation: Callable[[Tensor], Tensor]) -> Step:
    """Without gradients, many times."""
    x = torch.randn(1, 1, WIDTH)

    @torch.inference_mode()
    def step() -> None:
        for _ in range(REPEATS):
            operation(x)

    return step


def new_tokens(way: Callable[[Tensor, Tensor, Tensor], object]) -> Step:
    """A new token of each of 16 sequences attends to its source of 256, in each of three blocks, as T5 writes."""
    sources = [torch.randn(2, 16, 4, 256, 64) for _ in range(3)]
    q = torch.randn(16, 4, 1, 64)

    @torch.inference_mode()
    def step() -> None:
        for _ in range(REPEATS):
            for k, v in sources:
                way(q, k, v)

    return step


def function_of_autograd() -> Callable[[Tensor], Tensor]:
    weight = torch.ones(WIDTH)
    return lambda x: Normalised.apply(x, weight, 1e-6)


def step_of(family: str, kept: bool = True, narrow: bool = False) -> Step:
    case = next(case for case in training.CASES if case.family == family and not case.dropout)
    model, batch = training.our_model(case), training.make_batch(family)
    return training.make_step(model, batch, compiled=False, kept=kept, narrow=narrow)


def kept(step: Step) -> Step:
    keep_freed_memory()
    return step


def attention_ways(
    sequences: int, tokens: int, dtype: torch.dtype, dropout: float = 0.0
) -> dict[str, Callable[[], Step]]:
    return {
        "ours": lambda: kept(attention(by_products, sequences, tokens, dtype, dropout)),
        "torch's kernel": lambda: kept(attention(torchs_attention, sequences, tokens, dtype, dropout)),
    }


KERNELS: dict[str, dict[str, Callable[[], Step]]] = {
    "layer": {
        "oneDNN": lambda: kept(layer(True)),
        "torch's choice": lambda: kept(layer(False)),
    },
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
    "dropout": {
        "ours": lambda: kept(both_ways(lambda x: dropped(x, 0.1), WIDTH)),
        "torch's dropout": lambda: kept(both_ways(lambda x: F.dropout(x, 0.1), WIDTH)),
    },
    "attention, short": attention_ways(120, 17, torch.float32),
    "attention, short, bfloat16": attention_ways(120, 17, torch.bfloat16),
    "attention, bfloat16": attention_ways(16, 256, torch.bfloat16),
    "attention with dropout": attention_ways(16, 256, torch.float32, 0.1),
    "attention of new tokens, 100 times": {
        "ours, torch's kernel": lambda: new_tokens(lambda q, k, v: attend(q, k, v, None, 0.0, False, 1.0)),
        "products": lambda: new_tokens(lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
        "keys and values summed": lambda: new_tokens(lambda q, k, v: (k.sum(), v.sum())),
    },
    "loss": {
        "ours": lambda: kept(loss(True, False)),
        "torch's linear_cross_entropy": lambda: kept(loss(False, False)),
    },
    "loss, bfloat16": {
        "ours": lambda: kept(loss(True, True)),
        "linear, cross_entropy": lambda: kept(loss(False, True)),
    },
    "loss, smoothed": {
        "ours": lambda: kept(loss(True, False, 0.1)),
        "linear, cross_entropy": lambda: kept(loss(False, False, 0.1)),
    },
    "encoder's step": {
        "freed memory kept": lambda: step_of("encoder"),
        "given back": lambda: step_of("encoder", kept=False),
        "in bfloat16": lambda: step_of("encoder", narrow=True),
    },
    "decoder's step": {
        "float32": lambda: step_of("decoder"),
        "in bfloat16": lambda: step_of("decoder", narrow=True),
    },
}


def prepare(kernel: str, way: str) -> Callable[[], Step]:
    return KERNELS[kernel][way]


def main() -> None:
    parser = arguments_of("kernels", __doc__, data=False)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", help="names of kernels")
    arguments = parser.parse_args()
    rows = []
    for kernel, ways in KERNELS.items():
        if kernel not in (arguments.only or [kernel]):
            continue
        answers = in_turn({way: Worker(partial(prepare, kernel, way)) for way in ways}, arguments.rounds)
        times = {way: [1e3 * answer[way]["seconds"] for answer in answers] for way in ways}
        ours = median(times[next(iter(ways))])
        rows += [(kernel, way, median(all_), min(all_), max(all_), median(all_) / ours) for way, all_ in times.items()]
    header = ("what", "way", "ms", "least", "most", "to ours")
    print_table(f"torch {torch.__version__}, {torch.get_num_threads()} threads", header, rows)
    save(arguments.json, {"torch": torch.__version__, "header": header, "rows": rows})


if __name__ == "__main__":
    main()
