"""How fast a corpus becomes a token store, beside `datasets.map` with the same tokenizer, and in how much memory.

    python -m benchmarks.store --repeat 5,20 --rounds 5

Each measurement is a process of its own, ours and the peers' in turn. Ours is timed from the files to the finished
store: reading, cleaning, checking against the scan, tokenising, writing, checksums. The peers are timed in `map` alone,
on lines that are already in Arrow files. Memory is the proportional set size of the whole tree of processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from pipeline.data import catalogue
from pipeline.data.cleaning import Notes
from pipeline.data.config import CorpusConfig, TokenizerConfig
from pipeline.data.corpus import scan
from pipeline.data.sources import sources
from pipeline.data.store import prepare_store
from pipeline.terminal import note, print_table
from pipeline.tokenizer import train

WORKERS = 2
PEERS = ("datasets.map, transformers", "datasets.map, tokenizers")
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="novels-gutenberg", help="a folder of novels, or a set of the catalogue")
    parser.add_argument("--repeat", default="5,20", help="how often the data is repeated, one or more numbers")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--peer", choices=PEERS, help="one of the peers only; the faster, to save time")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/store.json"), help="where the numbers go")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        kind, *folders = arguments.job
        print(json.dumps(JOBS[kind](*map(Path, folders))))
        return
    data = Path(arguments.data) if Path(arguments.data).is_dir() else catalogue.get(arguments.data)
    repeats = [int(number) for number in arguments.repeat.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        kinds = ["ours", *([arguments.peer] if arguments.peer else PEERS)]
        rounds = arguments.rounds
        results = [row for repeat in repeats for row in compare(Path(scratch), data, repeat, rounds, kinds)]
    report(results)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"cores": os.cpu_count(), "results": results}, indent=2) + "\n")


def compare(scratch: Path, data: Path, repeat: int, rounds: int, kinds: list[str]) -> list[Result]:
    """Measure everything on the data repeated so many times."""
    tokenizer = scratch / "tokenizer"
    texts = [source.read(Notes()) or "" for source in sources(corpus_config(data))]  # clean, so that all read the same
    if not tokenizer.exists():
        train(iter(texts), TokenizerConfig(vocab_size=8192)).save(tokenizer)
    corpus = scratch / f"times-{repeat}"
    corpus.mkdir()
    for copy in range(repeat):
        for number, text in enumerate(texts):
            (corpus / f"{copy:02}-{number:02}.txt").write_text(text)
    size = sum(len(text.encode()) for text in texts) * repeat
    results = []
    for turn in range(rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory(dir=scratch) as output:
                measured = run_job(kind, corpus, tokenizer, Path(output))
            results.append({"repeat": repeat, "round": turn, "kind": kind, "bytes": size, **measured})
            note(f"times {repeat}, round {turn}, {kind}: {size / measured['seconds'] / 1e6:.2f} MB/s")
    tokens = {result["tokens"] for result in results}
    assert len(tokens) == 1, f"not the same work: {tokens}"
    return results


def run_job(kind: str, *folders: Path) -> Result:
    """Run a job in a process of its own and watch the memory of all its processes."""
    command = [sys.executable, "-m", "benchmarks.store", "--job", kind, *map(str, folders)]
    process = psutil.Popen(command, stdout=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_memory(process))
        time.sleep(0.1)
    assert process.returncode == 0, command
    return {**json.loads(process.stdout.read()), "peak_memory": peak}


def tree_memory(process: psutil.Process) -> int:
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended while we looked
            continue
    return total


# --- What is measured --------------------------------------------------------------------------------------------


def corpus_config(data: Path) -> CorpusConfig:
    held_out = ["00-00"]  # one copy of one book, or the end of each would be read for itself
    return CorpusConfig(corpus=[str(data)], deduplicate=False, validation_books=held_out, workers=WORKERS)


def ours(corpus: Path, tokenizer: Path, output: Path) -> Result:
    began = time.perf_counter()
    scanned = scan(corpus_config(corpus))
    scan_seconds = time.perf_counter() - began
    began = time.perf_counter()
    store = prepare_store(scanned, tokenizer, output)
    seconds = time.perf_counter() - began
    tokens = sum(len(stream) for stream in store.streams.values())
    ends = sum(shard.documents for stream in store.streams.values() for shard in stream.shards)
    size = sum(path.stat().st_size for path in store.path.iterdir())
    return {"seconds": seconds, "scan_seconds": scan_seconds, "tokens": tokens - ends, "bytes_per_token": size / tokens}


def datasets_with_transformers(corpus: Path, tokenizer: Path, output: Path) -> Result:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": fast(batch["text"], add_special_tokens=False)["input_ids"]}

    return mapped(encode, corpus, output)


def datasets_with_tokenizers(corpus: Path, tokenizer: Path, output: Path) -> Result:
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": [found.ids for found in raw.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    return mapped(encode, corpus, output)


def mapped(encode: Any, corpus: Path, output: Path) -> Result:
    """Lines as rows and batches of the default size, as transformers' run_clm.py does it."""
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, corpus.iterdir()))
    rows = datasets.load_dataset(
        "text", data_files=files, split="train", keep_linebreaks=True, cache_dir=str(output / "cache")
    )
    began = time.perf_counter()
    encoded = rows.map(encode, batched=True, num_proc=WORKERS, remove_columns=["text"])
    seconds = time.perf_counter() - began
    tokens = sum(len(ids) for batch in encoded.with_format("arrow").iter(1000) for ids in batch["input_ids"])
    return {"seconds": seconds, "tokens": tokens}


JOBS = {
    "ours": ours,
    "datasets.map, transformers": datasets_with_transformers,
    "datasets.map, tokenizers": datasets_with_tokenizers,
}


# --- What is shown -----------------------------------------------------------------------------------------------


def report(results: list[Result]) -> None:
    header = ["times", "what", "MB/s", "least", "most", "with scan", "peak MB", "bytes/token", "ratio"]
    rows: list[list[object]] = []
    for repeat in sorted({result["repeat"] for result in results}):
        kinds = [kind for kind in JOBS if of(results, repeat, kind)]
        speeds = {kind: [megabytes_a_second(result) for result in of(results, repeat, kind)] for kind in kinds}
        best_peer = max(statistics.median(speeds[kind]) for kind in kinds if kind != "ours")
        for kind, measured in speeds.items():
            own = of(results, repeat, kind)
            median = statistics.median(measured)
            scanned = [megabytes_a_second(result, "scan_seconds") for result in own if "scan_seconds" in result]
            whole = statistics.median(scanned) if scanned else ""
            peak = max(result["peak_memory"] for result in own) / 1e6
            stored = own[0].get("bytes_per_token", "")
            rows.append([repeat, kind, median, min(measured), max(measured), whole, peak, stored, median / best_peer])
    print_table(f"Text to tokens, {WORKERS} processes", header, rows)


def of(results: list[Result], repeat: int, kind: str) -> list[Result]:
    return [result for result in results if (result["repeat"], result["kind"]) == (repeat, kind)]


def megabytes_a_second(result: Result, also: str = "") -> float:
    seconds = result["seconds"] + result.get(also, 0.0)
    return float(result["bytes"] / seconds / 1e6)


if __name__ == "__main__":
    main()
