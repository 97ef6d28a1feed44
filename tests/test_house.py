"""The house itself."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from tests.novels import novel

PROJECT = Path(__file__).parent.parent


def test_tokenizers_is_the_library_and_our_folder_holds_data_only() -> None:
    assert tokenizers.__file__ is not None and hasattr(tokenizers, "Tokenizer")
    assert not Path(tokenizers.__file__).is_relative_to(PROJECT / "tokenizers")
    assert list((PROJECT / "tokenizers").rglob("*.py")) == []


def test_no_module_is_named_after_a_library_we_import() -> None:
    imported = {
        name
        for path in (PROJECT / "pipeline").rglob("*.py")
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    } - {"pipeline"}
    own = {path.stem for path in (PROJECT / "pipeline").rglob("*.py")}
    assert not imported & own


def test_the_package_can_be_read_in_a_day() -> None:
    """Fewer than 9,000 lines of code: what is left without blank lines, comments and docstrings."""
    lines = 0
    for path in (PROJECT / "pipeline").rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose = {
            number
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            lines += bool(line.strip()) and not line.strip().startswith("#") and number not in prose
    assert lines < 9000


def python_blocks() -> list[tuple[str, str]]:
    pages = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
    return [
        (page.name, block) for page in pages for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    ]


@pytest.mark.parametrize(("page", "code"), python_blocks())
def test_the_python_of_the_documentation_runs(page: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "my-novels").mkdir()
    for seed in range(3):
        (tmp_path / "my-novels" / f"{seed}.txt").write_text(novel(seed))
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
