"""How fast a training step is, and how much memory it takes, beside transformers, x-transformers and plain torch.

    python -m benchmarks.training --rounds 5 --compile

One shape: vocabulary 8192, width 256, 6 layers (encoder-decoder: 3 + 3), 4 heads, feed-forward 1024 (Llama 688: as many
parameters), 16 sequences of 256 tokens (encoder-decoder: 256 to 64), float32, fused AdamW. Each in a process of its
own, a step each in turn, as it is and, with --compile, by torch.compile; the ratio is between the faster ones. What
differs: ours computes logits only where there is a target, and never all at once, and keeps freed memory. The share of
the peak counts 2mnk for a product, attention in full, against the best product of two 2048² matrices of the same run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Step, Worker, arguments_of, in_turn, print_profile, save
from pipeline.bundle import make_model
from pipeline.data.batch import Batch
from pipeline.data.objectives import IGNORED
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.cost import count_flops
from pipeline.model.fast import keep_freed_memory
from pipeline.model.products import linear
from pipeline.terminal import note, print_table
from pipeline.training.config import OptimConfig
from pipeline.training.module import Network
from pipeline.training.optim import make_optimizer

VOCABULARY, WIDTH, LAYERS, HEADS, FEED_FORWARD, SEQUENCES, TOKENS, TARGET = 8192, 256, 6, 4, 1024, 16, 256, 64
MASKED = 0.15


@dataclass(frozen=True)
class Case:
    """A peer, and what of ours does the same work."""

    peer: str
    family: str
    make: Callable[[float], nn.Module]
    dropout: float = 0.0
    preset: str = "modern"

    @property
    def name(self) -> str:
        return f"{self.peer}, dropout {self.dropout:g}" if self.dropout else self.peer


# --- Peers -------------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A peer from a batch to its loss."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, batch: Batch) -> Tensor:
        return self.call(self.model, batch)


def hugging_face(kind: str, dropout: float) -> nn.Module:
    import transformers as t

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }
    wide = shape | {"intermediate_size": FEED_FORWARD, "max_position_embeddings": 512}
    drop: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model: Any
    if kind == "BERT":
        model = t.BertForMaskedLM(t.BertConfig(**wide, **drop))
    elif kind == "ModernBERT":
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
        tokens: dict[str, Any] = dict.fromkeys(names, 0)
        model = t.ModernBertForMaskedLM(t.ModernBertConfig(**wide, **tokens, local_attention=128))
    elif kind == "GPT-2":
        drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        model = t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=512, **drops)
        )
    elif kind == "Llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**(wide | {"intermediate_size": 688}), tie_word_embeddings=True))
    else:
        model = t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=FEED_FORWARD, num_layers=LAYERS // 2,
                num_heads=HEADS, dropout_rate=dropout,
            )
        )  # fmt: skip
    return Loss(model, partial(hugging_face_loss, kind))


def hugging_face_loss(kind: str, model: nn.Module, batch: Batch) -> Tensor:
    if kind == "T5":
        found = model(input_ids=batch.source_BS, decoder_input_ids=batch.inputs_BT, labels=batch.targets_BT)
    elif batch.inputs_BT is not None:  # they shift labels themselves
        found = model(input_ids=batch.inputs_BT, labels=batch.inputs_BT)
    else:
        found = model(input_ids=batch.source_BS, labels=batch.targets_BT)
    loss: Tensor = found.loss
    return loss


def x_transformers(dropout: float) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_flash=True, rotary_pos_emb=True, ff_mult=4)
    model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=512, attn_layers=layers, use_abs_pos_emb=False)
    return Loss(model, lambda model, batch: whole_loss(model(batch.inputs_BT), batch))


class PlainEncoder(nn.Module):
    """torch.nn's own layers between an embedding and an output matrix."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, FEED_FORWARD, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Batch) -> Tensor:
        ids_BT = batch.source_BS if batch.source_BS is not None else batch.inputs_BT
        assert ids_BT is not None
        x_BTC = self.embedding(ids_BT) + self.places.weight[: ids_BT.shape[1]]
        return whole_loss(self.output(self.layers(x_BTC)), batch)


def whole_loss(logits_BTV: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORED)


CASES = [
    Case("BERT", "encoder", partial(hugging_face, "BERT")),
    Case("ModernBERT", "encoder", partial(hugging_face, "ModernBERT")),
    Case("torch.nn", "encoder", PlainEncoder),
    Case("GPT-2", "decoder", partial(hugging_face, "GPT-2")),
    Case("Llama", "decoder", partial(hugging_face, "Llama")),
    Case("x-transformers", "decoder", x_transformers),
    Case("T5", "encoder-decoder", partial(hugging_face, "T5")),
    Case("BERT", "encoder", partial(hugging_face, "BERT"), dropout=0.1),
    Case("GPT-2", "decoder", partial(hugging_face, "GPT-2"), dropout=0.1),
]


# --- Ours --------------------------------------------------------------------------------------------------------


def our_model(case: Case, recompute: bool = False) -> Network:
    config = ModelConfig(
        family=case.family,  # type: ignore[arg-type]
        preset=case.preset,  # type: ignore[arg-type]
        size="small",
        dropout=case.dropout,
        attention_dropout=case.dropout,
    )
    model = make_model(resolve(config), VOCABULARY)
    for stack in filter(None, (model.encoder, model.decoder)):
        stack.recompute = recompute  # type: ignore[assignment]
    return Network(model)


def make_batch(family: str) -> Batch:
    """Random tokens, and targets where the family's objective has them."""
    torch.manual_seed(0)
    ids_BT = torch.randint(200, VOCABULARY, (SEQUENCES, TOKENS + 1))
    source_BS = inputs_BT = None
    if family == "encoder":
        source_BS = ids_BT[:, :TOKENS].contiguous()
        targets_BT = source_BS.where(torch.rand(source_BS.shape) < MASKED, IGNORED)
    elif family == "decoder":
        inputs_BT, targets_BT = ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
    else:
        source_BS, inputs_BT = ids_BT[:, :TOKENS].contiguous(), ids_BT[:, :TARGET].contiguous()
        targets_BT = ids_BT[:, 1 : TARGET + 1].contiguous()
    return Batch(
        source_BS=source_BS, source_real_BS=None, inputs_BT=inputs_BT, inputs_real_BT=None, targets_BT=targets_BT,
        prefix_B=None, tokens=SEQUENCES * TOKENS, samples=SEQUENCES,
        loss_positions=int((targets_BT != IGNORED).sum()),
    )  # fmt: skip


def in_parts(batch: Batch, samples: int) -> list[Batch]:
    """The batch as micro-batches of so many samples."""

    def part(start: int) -> Batch:
        return batch.each(lambda tensor: tensor[start : start + samples])

    return [part(start) for start in range(0, batch.samples, samples)]


def make_step(
    model: nn.Module, batch: Batch, compiled: bool, kept: bool = True, narrow: bool = False, micro_batch: int = 0
) -> Step:
    """One optimizer step on the same batch again, as users of ours and of the peer would do it."""
    parts = in_parts(batch, micro_batch) if micro_batch else [batch]
    model.train()
    ours = isinstance(model, Network)
    if isinstance(model, Network):
        torch.set_flush_denormal(True)
        if kept:
            keep_freed_memory()
        optimizer = make_optimizer(model.model, OptimConfig())
        for stack in filter(None, (model.model.encoder, model.model.decoder)) if compiled else ():
            stack.compile()
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if compiled:
            model.compile()

    def step() -> None:
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                loss = model(part) / (batch.loss_positions if ours else 1)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- Measuring ---------------------------------------------------------------------------------------------------


def prepare(number: int, options: argparse.Namespace, ours: bool, compiled: bool) -> Callable[[], Step]:
    case = CASES[number]
    batch = make_batch(case.family)
    case.make(0.0)  # imports its library
    if not ours:
        return lambda: make_step(case.make(case.dropout), batch, compiled)
    return lambda: make_step(our_model(case, options.recompute), batch, compiled, micro_batch=options.micro_batch)


def main() -> None:
    parser = arguments_of("training", __doc__, data=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="measure both compiled too, which takes minutes more")
    parser.add_argument("--only", nargs="*", help="names of peers")
    parser.add_argument(
        "--recompute", action="store_true", help="ours keeps no activations inside blocks, to save memory"
    )
    parser.add_argument(
        "--micro_batch", type=int, default=0, help="ours takes so many sequences at a time, to save memory"
    )
    parser.add_argument("--profile", action="store_true", help="show where the time of ours goes")
    arguments = parser.parse_args()
    rows, peak = [], matrix_peak()
    for number, case in enumerate(CASES):
        if case.name in (arguments.only or [case.name]):
            rows.append(measured(number, case, arguments, peak))
            note(f"{case.name}: {rows[-1]['ratio']:.2f}")
            if arguments.profile:
                step = prepare(number, arguments, ours=True, compiled=False)()
                print_profile(f"{case.name}, {case.family}: a step of ours", step)
    header = (
        "peer", "family", "ours, ms", "compiled", "peer, ms", "compiled", "ratio", "least", "most", "tokens/s",
        "share of peak", "MB", "peer's MB", "ratio of memory",
    )  # fmt: skip
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "x-transformers"))
    print_table(f"{versions}; peak {peak / 1e9:.0f} GFLOP/s", header, [tuple(row.values()) for row in rows])
    save(arguments.json, {"versions": versions, "peak": peak, "rows": rows})


def measured(number: int, case: Case, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    compiled = options.compile
    kinds = [(ours, fused) for fused in (False, True)[: 1 + compiled] for ours in (True, False)]
    answers = in_turn({kind: Worker(partial(prepare, number, options, *kind)) for kind in kinds}, options.rounds)
    median = {kind: statistics.median(answer[kind]["seconds"] for answer in answers) for kind in kinds}
    best = {
        who: min((kind for kind in kinds if kind[0] == who), key=lambda kind: median[kind]) for who in (True, False)
    }
    ratios = [answer[best[False]]["seconds"] / answer[best[True]]["seconds"] for answer in answers]
    memory = {who: answers[-1][who, False]["memory"] for who in (True, False)}
    return {
        "peer": case.name,
        "family": case.family,
        "ours": 1e3 * median[True, False],
        "ours compiled": 1e3 * median[True, True] if compiled else None,
        "theirs": 1e3 * median[False, False],
        "theirs compiled": 1e3 * median[False, True] if compiled else None,
        "ratio": median[best[False]] / median[best[True]],
        "least": min(ratios),
        "most": max(ratios),
        "tokens per second": SEQUENCES * TOKENS / median[best[True]],
        "share": flops(case) / median[best[True]] / peak,
        "memory": memory[True],
        "peer memory": memory[False],
        "memory ratio": memory[True] / memory[False],
    }


def flops(case: Case) -> float:
    model, batch = our_model(case).model, make_batch(case.family)
    source = 0 if batch.source_BS is None else TOKENS
    target = 0 if batch.inputs_BT is None else batch.inputs_BT.shape[1]
    count = count_flops(model.architecture, VOCABULARY, source, target, round(batch.loss_positions / SEQUENCES))
    return float(SEQUENCES * count.training)


def matrix_peak() -> float:
    """The most operations a second that a product of matrices reaches here, by the library that layers take."""
    one, other = torch.randn(2048, 2048), torch.randn(2048, 2048)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        linear(one, other)
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds)


if __name__ == "__main__":
    main()
