"""The house itself."""

import re
from pathlib import Path

import tokenizers

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
    lines = sum(path.read_text().count("\n") for path in (PROJECT / "pipeline").rglob("*.py"))
    assert lines < 6000
