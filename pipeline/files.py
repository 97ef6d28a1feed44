"""What every room does with files: whole or not at all, fingerprinted, one writer at a time."""

import fcntl
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from pipeline.errors import UserError
from pipeline.terminal import note

MACHINE = os.uname().nodename


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it to disk and rename it, on failure remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{MACHINE}-{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.chmod(usual_mode())  # some libraries write files that nobody else may read
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    except Exception as error:
        if (refused := refusal_in(error)) is None:
            raise
        refused.filename = refused.filename or str(path)  # a full disk does not say where
        raise refused from error
    finally:
        temporary.unlink(missing_ok=True)


def refusal_in(error: Exception) -> OSError | None:
    """What the system refused, if that is what an error is about: safetensors and torch say so in their own ways."""
    for one in (error, error.__context__):
        if isinstance(one, OSError):
            return one
    told = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(told[1]), os.strerror(int(told[1]))) if told else None


def remove_leftovers(path: Path) -> None:
    """Delete what writers of a file left beside it that were killed on this machine."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{MACHINE}-*.tmp"):
        writer = left.name.removesuffix(".tmp").rpartition("-")[2]
        if writer.isdigit() and not is_alive(int(writer)):
            left.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    return True


def usual_mode() -> int:
    """The rights that a new file gets from the user's umask; never for all to write."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o664 & ~mask


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people and programs alike, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON, or say in one line which file is damaged."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it and make it again") from error


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write a record with a fingerprint of itself, by which damage is noticed."""
    value = {key: item for key, item in value.items() if key != "fingerprint"}
    write_json(path, value | {"fingerprint": fingerprint(value)})


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Read a record without its fingerprint, which must fit."""
    value = read_json(path)
    recorded = value.pop("fingerprint", None) if isinstance(value, dict) else ""
    if recorded not in (None, fingerprint(value)):
        raise UserError(f"{path}: damaged, its fingerprint differs; {remedy}")
    return dict(value)


@contextmanager
def described(path: Path, remedy: str) -> Iterator[None]:
    """Turn what goes wrong with the content of a file that we wrote into one line that names it."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: damaged, or not what this program wrote; {remedy}") from error


def fingerprint(value: Any) -> str:
    """The SHA-256 of a JSON value, the same whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_output(folder: Path, half: set[str], whole: bool) -> None:
    """Refuse to write into a folder that holds anything but what the same command made, half or whole, or a run's."""
    folder = folder.resolve()
    of_run = folder.name == "bundle" and (folder.parent / "config.yaml").is_file()
    if of_run or not (whole or {path.name for path in folder.glob("[!.]*")} <= half):
        why = "is for its run to write" if of_run else "holds what another command made, or other files"
        raise UserError(f"{folder}: {why}; choose another folder")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file while the block runs; it ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as opened:
        if not taken(opened):
            note(f"waiting for another process that works in {path.parent}")
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def taken(lock: IO[str]) -> bool:
    """Take an exclusive lock if nobody holds it; it ends with the process, however that ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def flush_folder(folder: Path) -> None:
    """Make a rename inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
