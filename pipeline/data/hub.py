"""Hugging Face datasets, from the hub or a folder. The libraries take seconds to import: only who uses them pays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from pipeline.errors import UserError

OPTIONS = ("split", "config", "revision")


def rows(specification: str, streaming: bool) -> Iterator[dict[str, Any]]:
    """The rows of NAME or FOLDER, with ?split=…&config=…&revision=… where the defaults do not fit."""
    name, _, query = specification.partition("?")
    options = dict(parse_qsl(query))
    for option in options:
        if option not in OPTIONS:
            raise UserError(f"hf:{specification}: unknown option {option!r}; it takes {', '.join(OPTIONS)}")
    with one_line_errors(f"hf:{specification}"):
        yield from open_dataset(name, options, streaming)


def open_dataset(name: str, options: dict[str, str], streaming: bool) -> Any:
    import datasets

    split, config = options.get("split", "train"), options.get("config")
    folder = Path(name).expanduser()
    if (folder / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(folder))[split]
    if (folder / "dataset_info.json").exists():
        return datasets.load_from_disk(str(folder))
    if folder.is_dir():  # streamed: the cache would return old rows for a file changed within its size and time
        return datasets.load_dataset(str(folder), config, split=split, streaming=True)
    from huggingface_hub import HfApi

    # Asking first names the revision that is read, and fails at once where there is no network.
    revision = HfApi().dataset_info(name, revision=options.get("revision"), timeout=30).sha
    return datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)


def snapshot(repository: str, revision: str, patterns: Sequence[str]) -> Path:
    """Fetch files of a dataset into the hub's own cache, which resumes; the folder bears the name of the commit."""
    from huggingface_hub import snapshot_download

    with one_line_errors(repository):
        fetched = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=list(patterns))
    return Path(fetched)


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Turn whatever the hub's clients raise into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # theirs, and those of the HTTP and file libraries they happen to use
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{name}: cannot be fetched from the Hugging Face hub or read ({reason:.300}); check name and network"
        ) from error
