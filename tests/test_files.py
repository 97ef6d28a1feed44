"""Files: whole or not at all, and one writer at a time."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from pipeline.files import fingerprint, locked, replacing, write_text


def test_a_failed_write_leaves_the_old_file_and_says_where(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    write_text(path, "old")
    with pytest.raises(OSError, match="x.txt") as caught, replacing(path) as temporary:
        temporary.write_text("new")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.errno == errno.ENOSPC and path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["x.txt"]


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
