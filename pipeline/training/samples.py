"""What a model makes of held-out text: filled masks, continuations, restored spans; and how much of it is copied."""

from dataclasses import dataclass

import numpy as np

from pipeline.bundle import Model
from pipeline.config import GenerationConfig
from pipeline.data.batch import collate
from pipeline.data.datamodule import HeldOut
from pipeline.data.objectives import IGNORED, Example
from pipeline.data.shard import Integers, Stream
from pipeline.files import write_text
from pipeline.model.generation import encode, generate, inference
from pipeline.model.transformer import Memory
from pipeline.tokenizer import Tokenizer
from pipeline.training.run import Run
from pipeline.training.tracking import Tracker

SAMPLES = 3
NEW_TOKENS = 64
HEADER = ("given", "written", "original")
Row = tuple[str, str, str]


def write_samples(
    model: Model, tokenizer: Tokenizer, examples: HeldOut, grams: "Grams", run: Run, step: int, tracker: Tracker
) -> dict[str, float]:
    """Write samples to a file and to the tracker; return the share of what was continued that stands in training."""
    chosen = examples.numbers[:: max(1, len(examples.numbers) // SAMPLES)][:SAMPLES]
    made = [sample(model, tokenizer, examples.example(number)) for number in chosen]
    rows = [row for row, _ in made]
    blocks = ("\n".join(f"{name}: {text}" for name, text in zip(HEADER, row, strict=True)) for row in rows)
    write_text(run.path / "samples" / f"step-{step:08}.txt", "\n\n".join(blocks) + "\n")
    tracker.table("samples", HEADER, rows, step)
    copied = grams.copied([ids for _, ids in made]) if model.architecture.family != "encoder" else None
    return {} if copied is None else {"val/copy_rate": copied}


def sample(model: Model, tokenizer: Tokenizer, example: Example) -> tuple[Row, Integers]:
    """What is given, what the model writes, and what stood there."""
    original = tokenizer.decode(example.targets[example.targets != IGNORED], skip_special=False)
    if example.inputs is None:
        assert example.source is not None
        guesses = fill(model, example)
        filled = np.where(example.targets == IGNORED, example.source, guesses)
        given = tokenizer.decode(example.source, skip_special=False)
        return (given, tokenizer.decode(filled), original), guesses[example.targets != IGNORED]
    if example.source is not None:
        given = tokenizer.decode(example.source, skip_special=False)
        memory = encode(model, [example.source.tolist()])
        ids = write_on(model, tokenizer, [int(example.inputs[0])], memory)
        return (given, tokenizer.decode(ids, skip_special=False), original), ids
    half = len(example.inputs) // 2 + 1
    prompt, rest = example.inputs[:half], example.inputs[half:]
    ids = write_on(model, tokenizer, prompt.tolist())
    return (tokenizer.decode(prompt), tokenizer.decode(ids), tokenizer.decode(rest)), ids


def write_on(model: Model, tokenizer: Tokenizer, prompt: list[int], memory: Memory | None = None) -> Integers:
    """Go on from a prompt, as far as the model's positions reach."""
    limit = model.decoder.positions.limit if model.decoder else None
    room = NEW_TOKENS if limit is None else max(1, min(NEW_TOKENS, limit - len(prompt)))
    settings = GenerationConfig(max_new_tokens=room, temperature=0.8, top_p=0.95, seed=1)
    written = generate(model, [prompt], settings, end=tokenizer.id("end"), memory=memory)
    return np.array(written[0][0].ids, np.int64)


def fill(model: Model, example: Example) -> Integers:
    """The most probable token of every position of an encoder."""
    device = next(model.parameters()).device
    batch = collate([example], pad=0).to(device)
    assert batch.source_BS is not None
    with inference(model):
        return model.logits(model.encode(batch.source_BS).states_BSC)[0].argmax(-1).cpu().numpy()


@dataclass(frozen=True)
class Grams:
    """The sequences of a few tokens that stand in the training text, as sorted hashes."""

    hashes: np.ndarray[tuple[int], np.dtype[np.uint64]]
    length: int = 12
    """Of tokens, so long that they hardly come twice by chance."""

    @classmethod
    def of(cls, stream: Stream, most: int = 20_000_000) -> "Grams":
        """Of a stream, or its beginning if it is very long."""
        return cls(np.unique(gram_hashes(stream.read(0, min(len(stream), most)).astype(np.int64), cls.length)))

    def copied(self, texts: list[Integers]) -> float | None:
        """The share of sequences in some texts that stand in the training text; None if they are too short."""
        asked = np.concatenate([gram_hashes(text, self.length) for text in texts])
        return float(np.isin(asked, self.hashes).mean()) if len(asked) else None


def gram_hashes(ids: Integers, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    count = max(0, len(ids) - length + 1)
    mixed = np.zeros(count, np.uint64)
    for offset in range(length if count else 0):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + ids[offset : offset + count].astype(np.uint64) + np.uint64(1)
    return mixed
