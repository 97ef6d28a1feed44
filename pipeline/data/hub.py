"""Hugging Face datasets, from the hub or from a folder, as rows."""

from collections.abc import Iterator
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
    import datasets  # two seconds; only those who use it pay for it

    try:
        yield from open_dataset(name, options, streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"hf:{specification}: cannot be read ({type(error).__name__}: {reason:.300})") from error


def open_dataset(name: str, options: dict[str, str], streaming: bool) -> Any:
    import datasets

    split = options.get("split", "train")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return datasets.load_dataset(
            name, options.get("config"), split=split, revision=options.get("revision"), streaming=streaming
        )
    if (folder / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(folder))[split]
    if (folder / "dataset_info.json").exists():
        return datasets.load_from_disk(str(folder))
    # Streamed, whatever was asked for: the cache would return old rows for a file changed within its size and time.
    return datasets.load_dataset(str(folder), options.get("config"), split=split, streaming=True)
