"""The demo in miniature: every command of it, on the texts that come with the project."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_demo_runs_without_a_network_and_again_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    command = tmp_path / "triptych"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipeline "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "TRIPTYCH": str(command), "DEMO_TEXTS": "shipped", "DEMO_STEPS": "3", "PYTHONPATH": str(PROJECT),
        "TRIPTYCH_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            ["sh", str(PROJECT / "demo.sh")], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout + done.stderr)
    assert outputs[0].count("$ triptych finetune") == 7 and "$ triptych finetune" not in outputs[1]
    assert "/bundle 'A moving story, told with warmth and wit.'" in outputs[0]  # as it can be pasted
    assert {"sentiment", "summarization", "translation"} <= set(outputs[1].split())
    assert (tmp_path / "demo/study/report.html").stat().st_size > 10_000
    assert list((tmp_path / "demo/attention").glob("*.png"))
