"""Files of others that mean harm, secrets that must not get out, and the rights of the files that are made."""

import gzip
import json
import os
import pickle
import resource
import shutil
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chaos.attempt import attempt
from chaos.damage import make_agree
from chaos.material import Material, finetune_words
from chaos.processes import Command
from tests.training.jobs import arguments
from tests.training.wandb_server import serving

Trap = tuple[str, list[str]]
"""What it is, and the command that walks into it."""


@dataclass(frozen=True)
class Verdict:
    """What was tried, what was wrong with the result if anything, and how it ended."""

    name: str
    wrong: str
    ended: str


@dataclass(frozen=True)
class Mark:
    """What a pickle can be made to do when it is loaded: here, to leave a mark."""

    path: Path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def try_traps(made: Material, folder: Path) -> Iterator[Verdict]:
    """Walk into every trap: none may run anything, write outside its folder, or take much memory."""
    inside, mark = folder / "inside", folder / "mark"
    shutil.rmtree(folder, ignore_errors=True)
    inside.mkdir(parents=True)
    for traps in (traps_that_run, traps_that_swell):
        for name, words in traps(made, inside, mark):
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            outcome = attempt(words)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) // 1024
            outside = [str(path) for path in folder.iterdir() if path != inside]
            wrong = outcome.wrong or ", ".join(outside) or (f"{grown} MB of memory" if grown > 400 else "")
            told = outcome.error.strip().splitlines()[-1] if outcome.code else "used, and nothing of it was run"
            yield Verdict(name, wrong, told.replace(f"{inside}/", ""))


def traps_that_run(made: Material, inside: Path, mark: Path) -> Iterator[Trap]:
    """Files that hold a call which leaves a mark, or a path that leads out of the folder."""
    run, bundle, model = inside / "run", inside / "bundle", inside / "model"
    shutil.copytree(made.run, run)
    for path in (run / "checkpoints").glob("*.pt"):
        torch.save({"model": {}, "progress": Mark(mark)}, path)
    make_agree(run)
    yield "a checkpoint that is a pickle", ["bundle", str(run), f"--output={inside / 'out'}"]
    with (run / "config.yaml").open("a") as opened:
        opened.write(f"extra: !!python/object/apply:os.mkdir [{mark}]\n")
    yield "a YAML tag in the config of a run", ["bundle", str(run), f"--output={inside / 'out'}"]
    shutil.copytree(made.run / "bundle", bundle)
    (bundle / "model.safetensors").write_bytes(pickle.dumps(Mark(mark)))
    make_agree(bundle)
    yield "a pickle as the weights of a bundle", ["generate", str(bundle), "The"]
    shutil.copytree(made.exported, model)
    (model / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    for name in ("config.json", "tokenizer_config.json"):
        code = {"auto_map": {"AutoModel": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}}
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | code))
    yield "a model of the hub with code", ["import", str(model), str(inside / "out")]
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Mark(mark)))
    shutil.copy(made.exported / "config.json", model)
    yield "a pickled pytorch_model.bin", ["import", str(model), str(inside / "out")]
    (inside / "evil").mkdir()
    shutil.copy(model / "evil.py", inside / "evil")
    yield "a dataset that is a script", ["corpus", "inspect", f"hf:{inside / 'evil'}", "--workers=1"]
    (inside / "tag.yaml").write_text(f"corpus: [!!python/object/apply:os.mkdir [{mark}]]\n")
    yield "a YAML tag in a list", ["corpus", "inspect", f"--config={inside / 'tag.yaml'}"]
    call = f"{{class_path: os.mkdir, init_args: {{path: {mark}}}}}"
    (inside / "class.yaml").write_text(f"data: {{corpus: [x]}}\ntrainer: {{extra: {{callbacks: {call}}}}}\n")
    yield "a class to be made, in YAML", ["pretrain", f"--config={inside / 'class.yaml'}", "--print_config"]
    with zipfile.ZipFile(inside / "books.zip", "w") as archive:
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        for member, text in (("../mark/a.txt", "dark " * 99), (f"{mark}/b.txt", "night " * 99), (link, "/etc/passwd")):
            archive.writestr(member, text)
    store = [f"--tokenizer={made.tokenizer}", f"--output={inside / 'out'}", "--workers=1"]
    yield "a zip with ../ and a link", ["prepare", f"--corpus={inside / 'books.zip'}", *store]


def traps_that_swell(made: Material, inside: Path, mark: Path) -> Iterator[Trap]:
    """Small files that stand for more than there is memory."""
    with gzip.open(inside / "bomb.txt.gz", "wb", compresslevel=1) as opened:
        for _ in range(1024):
            opened.write(bytes(2**20))
    yield "a gzip of 1 GB of zeros", ["corpus", "inspect", str(inside / "bomb.txt.gz"), "--workers=1"]
    with zipfile.ZipFile(inside / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.jsonl", b"a" * 2**28)
    yield "a zip of a line of 256 MB", ["corpus", "inspect", str(inside / "bomb.zip"), "--workers=1"]
    lines = ["trainer:\n  extra:\n    a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"    a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (inside / "bomb.yaml").write_text("\n".join(lines))
    yield "YAML of a trillion values", ["pretrain", "--data.corpus=x", f"--config={inside / 'bomb.yaml'}"]
    shutil.copytree(made.run / "bundle", inside / "wide")
    config = (inside / "wide" / "config.yaml").read_text()
    (inside / "wide" / "config.yaml").write_text(config.replace("feed_forward: 32", "feed_forward: 16000000"))
    make_agree(inside / "wide")
    yield "a small bundle of a huge model", ["generate", str(inside / "wide"), "The"]


# --- Secrets and rights ------------------------------------------------------------------------------------------

NAMES = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_PASSWORD", "SSH_PASSPHRASE")
CANARIES = {name: f"canary{number}{'0123456789abcdef' * 3}"[:40] for number, name in enumerate(NAMES)}
PUBLIC = "seen-by-everybody"  # what must be found, or the search is worth nothing


def try_secrets(made: Material, folder: Path) -> Iterator[Verdict]:
    """Plant secrets in the environment, do jobs on and off line, and look for them in all that is left."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "home").mkdir(parents=True)
    few: dict[str, Any] = {"trainer__max_steps": 6, "trainer__validate_every": 3, "tracking__group": PUBLIC}
    jobs = {
        "online pretraining": arguments(made.novels, folder / "one", tracking__mode="online", **few),
        "offline fine-tuning": finetune_words(made.rows, folder / "two", tracking__mode="offline", **few),
        "sync": ["sync", str(folder / "two")],
        "a mistake with --debug": ["pretrain", "--debug", f"--resume={folder / 'one'}", "--model.width=64"],
    }
    with serving() as server:
        own = {"HOME": str(folder / "home"), "WANDB_BASE_URL": server.url, "WANDB_MODE": "online"} | CANARIES
        for name, words in jobs.items():
            code = Command(words, folder / "printed.txt", own).wait()
            kept = repr([(run.config, run.fields, run.rows, run.summary) for run in server.runs.values()]).encode()
            places = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            places["the server"] = kept + b"".join(server.uploads.values())
            found = [
                f"{key} in {place}" for place, text in places.items() for key in NAMES if CANARIES[key].encode() in text
            ]
            blind = not any(PUBLIC.encode() in text for text in places.values()) and "nothing was found at all"
            odd = code != (2 if "mistake" in name else 0) and f"ended with {code}"
            yield Verdict(
                f"secrets after {name}", ", ".join(found) or blind or odd or "", f"{len(places)} files searched"
            )


def try_rights(made: Material, folder: Path, masks: Sequence[int] = (0o077, 0o027, 0o022, 0o000)) -> Iterator[Verdict]:
    """Make files under several umasks: they have the user's rights, and not everybody may write them."""
    for mask in masks:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        words = arguments(made.novels, folder / "run", trainer__max_steps=4, tracking__mode="offline")
        code = Command(words, folder.with_suffix(".txt"), {"WANDB_MODE": "offline"}, {"umask": mask}).wait()
        files = [path for path in folder.rglob("*") if not path.is_symlink() and "wandb" not in path.parts]
        wrong = [f"{path} {path.stat().st_mode & 0o777:o}" for path in files if path.stat().st_mode & (mask | 0o002)]
        wrong += [f"{path}: for its owner only" for path in files if mask == 0o022 and not path.stat().st_mode & 0o044]
        wrong += [f"ended with {code}"] if code else []
        yield Verdict(f"umask {mask:03o}", ", ".join(wrong), f"{len(files)} files and folders")
