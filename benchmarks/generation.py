"""How fast a model writes on, beside transformers' `generate` with the same weights and settings.

    python -m benchmarks.generation --rounds 5

Vocabulary 8192, width 256, 6 layers (T5: 3 + 3), 4 heads, float32; GPT-2 goes on from 32 tokens, T5 from 256;
128 new tokens, none fewer. Ours and theirs in turn, in one process: `generate` as it is and, with --compile, with its
static cache and a compiled step; the ratio is to the faster one. Ours is never compiled.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.harness import arguments_of, print_profile, save
from pipeline.bundle import Bundle, Model, make_model
from pipeline.config import GenerationConfig
from pipeline.data.config import TokenizerConfig
from pipeline.model.config import ModelConfig, resolve
from pipeline.model.generation import encode, generate
from pipeline.model.huggingface import export_model
from pipeline.terminal import note, print_table
from pipeline.tokenizer import train

VOCABULARY, NEW_TOKENS, END = 8192, 128, 3
CASES = {"greedy, batch 1": (1, 1), "greedy, batch 16": (16, 1), "beam 5, batch 4": (4, 5)}


def main() -> None:
    parser = arguments_of("generation", __doc__, data=False)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--compile", action="store_true", help="measure theirs compiled too, which takes minutes more")
    parser.add_argument("--profile", action="store_true", help="show where the time of ours goes")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [row for preset in ("gpt2", "t5") for row in compare(preset, arguments)]
    header = ("model", "what", "ours, tokens/s", "theirs", "compiled", "ratio", "least", "most")
    print_table(f"transformers {transformers.__version__}, torch {torch.__version__}", header, rows)
    save(arguments.json, {"rows": [dict(zip(header, row, strict=True)) for row in rows]})


def compare(preset: str, arguments: argparse.Namespace) -> list[tuple[object, ...]]:
    ours, theirs = same_model(preset)
    rows: list[tuple[object, ...]] = []
    for name, (batch, beams) in CASES.items():
        ids = torch.randint(200, VOCABULARY, (batch, 32 if preset == "gpt2" else 256), generator=torch.Generator())
        jobs = {"ours": our_job(ours, ids, beams), "theirs": their_job(theirs, ids, beams, compiled=False)}
        if arguments.compile:
            jobs["compiled"] = their_job(theirs, ids, beams, compiled=True)
        speeds: dict[str, list[float]] = {kind: [] for kind in jobs}
        for turn in range(arguments.rounds + 1):  # the first warms up
            for kind, job in jobs.items():
                began = time.perf_counter()
                assert job() == batch * NEW_TOKENS
                if turn:
                    speeds[kind].append(batch * NEW_TOKENS / (time.perf_counter() - began))
        if arguments.profile:
            print_profile(f"{preset}, {name}: for each step", jobs["ours"], NEW_TOKENS)
        note(f"{preset}, {name}: done")
        median = {kind: statistics.median(found) for kind, found in speeds.items()}
        peer = max(list(jobs)[1:], key=lambda kind: median[kind])
        ratios = [one / two for one, two in zip(speeds["ours"], speeds[peer], strict=True)]
        measured = (median["ours"], median["theirs"], median.get("compiled"), median["ours"] / median[peer])
        rows.append((preset, name, *measured, min(ratios), max(ratios)))
    return rows


def same_model(preset: str) -> tuple[Model, Any]:
    """A random model of ours, and what transformers loads of its export."""
    torch.manual_seed(0)
    family = "decoder" if preset == "gpt2" else "encoder-decoder"
    config = ModelConfig(family=family, preset=preset, size="small")  # type: ignore[arg-type]
    ours = make_model(resolve(config), VOCABULARY).eval()
    tokenizer = train(["a few words to train on"], TokenizerConfig(vocab_size=400))
    auto = transformers.AutoModelForCausalLM if preset == "gpt2" else transformers.AutoModelForSeq2SeqLM
    with tempfile.TemporaryDirectory() as folder:
        export_model(Bundle(ours, tokenizer), Path(folder))
        return ours, auto.from_pretrained(folder).eval()


def our_job(model: Model, ids: torch.Tensor, beams: int) -> Callable[[], int]:
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, beams=beams)

    def job() -> int:
        if model.architecture.family == "decoder":
            found = generate(model, ids.tolist(), config, end=END)
        else:
            found = generate(model, [[2]] * len(ids), config, end=END, memory=encode(model, ids.tolist()))
        return sum(len(best.ids) for best, *_ in found)

    return job


def their_job(model: Any, ids: torch.Tensor, beams: int, compiled: bool) -> Callable[[], int]:
    settings: dict[str, Any] = {}
    if compiled:
        settings = {"cache_implementation": "static", "compile_config": transformers.CompileConfig()}
        settings["compile_config"]._compile_all_devices = True  # on a CPU too

    def job() -> int:
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=beams, max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, eos_token_id=END, pad_token_id=0, **settings,
        )  # fmt: skip
        prompt = 1 if model.config.is_encoder_decoder else ids.shape[1]
        return len(ids) * (int(written.shape[1]) - prompt)

    return job


if __name__ == "__main__":
    main()
