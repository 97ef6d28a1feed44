"""Damaged files of every kind that the pipeline makes, by accident or by one who makes the checksums agree."""

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from chaos.attempt import Outcome, attempt
from chaos.material import Material
from pipeline.errors import UserError
from pipeline.files import file_hash, fingerprint, read_json, write_sealed


def damage(content: bytes, seed: int) -> bytes:
    """A file after an accident: cut off, zeroed, repeated, with something put in, replaced, or with bits flipped."""
    draw = random.Random(seed)
    where, size = draw.randrange(max(1, len(content))), draw.choice([1, 1, 8, 100, 5000])
    begin, part, end = content[:where], content[where : where + size], content[where + size :]
    flipped = bytes(byte ^ 1 << draw.randrange(8) for byte in part)
    ways = [b"", bytes(len(part)), part * 2, draw.randbytes(size) + part, flipped, flipped]
    return draw.choice([begin, draw.randbytes(size), *(begin + way + end for way in ways)])


def retold(value: Any, draw: random.Random) -> Any:
    """A value of JSON in which one thing, somewhere, was removed or replaced by something of another kind."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {name: kept for name, kept in value.items() if name != key}
        return value | {key: retold(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        number = draw.randrange(len(value))
        return [*value[:number], retold(value[number], draw), *value[number + 1 :]]
    return draw.choice([None, True, -1, 0, 10**12, 1e308, "", "x", "../../x", [], {}, [None], {"a": {}}, "9" * 50])


def things(made: Material, to: Path) -> dict[str, tuple[Path, list[str]]]:
    """What can be damaged, and a command that uses the copy of it."""
    copy, out = str(to / "copy"), str(to / "out")
    corpus = [f"--corpus={made.novels}", f"--tokenizer={made.tokenizer}", "--workers=1"]
    return {
        "bundle": (made.run / "bundle", ["generate", copy, "The", "--max_new_tokens=2"]),
        "classifier": (made.classifier, ["predict", copy, "a lovely film"]),
        "tokenizer": (made.tokenizer, ["tokenizer", "compare", copy, f"--text={made.novels / '0.txt'}"]),
        "model of transformers": (made.exported, ["import", copy, out]),
        "checkpoint": (made.run, ["bundle", copy, f"--output={out}"]),
        "run": (made.run, ["runs", copy]),
        "store": (made.store.parent, ["prepare", *corpus, f"--output={copy}"]),
    }


DAMAGES = st.tuples(st.sampled_from(range(7)), st.integers(0, 40), st.integers(0, 2**32), st.booleans(), st.booleans())
UNDAMAGED: dict[str, str] = {}
"""What each thing gives when nothing is wrong with it."""


def try_damage(made: Material, folder: Path, case: tuple[int, int, int, bool, bool]) -> tuple[Outcome, str]:
    """Use a thing of which one file was damaged; what is accepted must give what it gave before."""
    kind, number, seed, structured, agreeing = case
    name, (source, words) = list(things(made, folder).items())[kind]
    copy = folder / "copy"
    if name not in UNDAMAGED:
        shutil.copytree(source, copy)
        UNDAMAGED[name] = attempt(words).output + digest(folder)
        shutil.rmtree(folder)
    shutil.copytree(source, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.name != ".lock")
    path = files[number % len(files)]
    if structured and path.suffix in (".json", ".yaml"):
        document = retold(yaml.safe_load(path.read_text()), random.Random(seed))
        path.write_text(yaml.dump(document) if path.suffix == ".yaml" else json.dumps(document))
    else:
        path.write_bytes(damage(path.read_bytes(), seed))
    if agreeing:  # as one who means harm would
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, UserError):
            make_agree(copy)
    outcome = attempt(words)
    vouched = not (
        agreeing or name in ("model of transformers", "run") or (name, path.name) == ("checkpoint", "config.yaml")
    )
    vouched &= "damaged" not in outcome.error  # it says so, and has an older checkpoint
    if outcome.code == 0 and not outcome.wrong and vouched and outcome.output + digest(folder) != UNDAMAGED[name]:
        outcome = Outcome(0, "", "", f"damage to {name} {path.name} was not noticed")
    return outcome, f"{name} {path.relative_to(copy)} {case}"


def digest(folder: Path) -> str:
    """The hashes of what a command has made or mended."""
    files = [*folder.glob("copy/*/*.bin"), folder / "out" / "model.safetensors"]
    return " ".join(file_hash(path) for path in files if path.exists())


def make_agree(folder: Path) -> None:
    """Correct all checksums of a bundle, a run or a store."""
    for path in folder.rglob("step-*.json"):
        write_sealed(path, read_json(path) | {"sha256": file_hash(path.with_suffix(".pt"))})
    for name in ("manifest.json", "prepared.json"):
        for path in folder.rglob(name):
            write_sealed(path, read_json(path))
    if (folder / "model.safetensors").exists():
        hashes = {
            "weights_sha256": file_hash(folder / "model.safetensors"),
            "config_sha256": file_hash(folder / "config.yaml"),
        }
        known = fingerprint(read_json(folder / "tokenizer.json"))
        write_sealed(folder / "meta.json", read_json(folder / "meta.json") | hashes | {"tokenizer_fingerprint": known})
