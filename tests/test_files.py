"""Files: whole or not at all, and one writer at a time."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.files import MACHINE, fingerprint, locked, read_sealed, replacing, write_sealed, write_text


def test_a_failed_write_leaves_the_old_file_and_says_where(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    write_text(path, "old")
    with pytest.raises(OSError, match="x.txt") as caught, replacing(path) as temporary:
        temporary.write_text("new")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.errno == errno.ENOSPC and path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["x.txt"]


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_a_full_disk_is_known_whatever_a_library_makes_of_it(library: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "x") as temporary:
        temporary.touch()
        if library == "safetensors":
            raise ValueError("I/O error: No space left on device (os error 28)")
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")
    assert caught.value.filename == str(tmp_path / "x") and not list(tmp_path.iterdir())


def test_what_killed_writers_left_is_removed_and_nothing_of_living_ones(tmp_path: Path) -> None:
    living = tmp_path / f".x.txt.{MACHINE}-{os.getppid()}.tmp"
    for name in (living.name, f".x.txt.{MACHINE}-999999999.tmp", f".x.txt.{MACHINE}-{10**30}.tmp"):
        (tmp_path / name).touch()
    write_text(tmp_path / "x.txt", "new")
    assert sorted(tmp_path.iterdir()) == [living, tmp_path / "x.txt"]


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o000, 0o664)])
def test_files_have_the_users_rights_and_are_never_for_all_to_write(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        with replacing(tmp_path / "x") as temporary:
            temporary.touch(0o600)  # as safetensors does
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode


def test_a_flipped_bit_in_a_record_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_sealed(path, {"step": 12, "score": 0.5, "fingerprint": "of another time"})
    assert read_sealed(path, "make it again") == {"step": 12, "score": 0.5}
    path.write_text(path.read_text().replace("12", "13"))
    with pytest.raises(UserError, match="its fingerprint differs; make it again"):
        read_sealed(path, "make it again")


def test_the_second_process_waits_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def second() -> None:
        with locked(tmp_path / "lock"):
            order.append("second")

    with locked(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert capsys.readouterr().err.startswith("waiting for another process")


def test_fingerprints_do_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": [3]})
