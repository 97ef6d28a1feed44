"""Using a bundle: what is written is shown as it is written, and is the same text."""

from pathlib import Path

import pytest

from pipeline import cli
from pipeline.bundle import Bundle, make_model, save_bundle
from pipeline.config import GenerationConfig
from pipeline.data.config import TokenizerConfig
from pipeline.inference import load
from pipeline.model.config import Family, ModelConfig, resolve
from pipeline.tokenizer import train


@pytest.fixture(params=["decoder", "encoder-decoder"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An untrained model of bytes, which writes many characters that are none."""
    import torch

    family: Family = request.param
    tokenizer = train(["It was a dark night – “dark”, é."], TokenizerConfig(kind="byte"))
    torch.manual_seed(1)
    model = make_model(resolve(ModelConfig(family=family, size="tiny", width=32)), tokenizer.vocab_size)
    save_bundle(Bundle(model, tokenizer), tmp_path / "bundle")
    return tmp_path / "bundle"


def test_pieces_make_the_text(bundle: Path) -> None:
    for seed in range(3):
        pieces: list[str] = []
        settings = GenerationConfig(max_new_tokens=40, temperature=1.0, seed=seed)
        texts = load(bundle).generate("It was “", settings, pieces.append)
        assert "".join(pieces) == texts[0] == load(bundle).generate("It was “", settings)[0]
        assert len(pieces) > 10 and all(len(piece) < 30 for piece in pieces)


def test_no_piece_ends_within_a_character() -> None:
    from pipeline.inference import Pieces

    shown: list[str] = []
    pieces = Pieces(lambda ids: bytes(ids).decode(errors="replace"), shown.append)
    for byte in "a“é".encode():
        pieces(byte)
    assert [piece for piece in shown if piece] == ["a", "“", "é"]


def test_the_command_streams_on_a_terminal_or_when_asked(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", str(bundle), "It was", "--max_new_tokens", "12", "--temperature", "1"]
    flushed: list[None] = []
    printed = []
    for words, terminal in (([], False), (["--stream"], False), ([], True), (["--stream", "false"], True)):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
            patch.setattr("sys.stdout.flush", lambda: flushed.append(None))
            assert cli.main([*command, *words]) == 0
        printed.append((capsys.readouterr().out, len(flushed) > 5))
        flushed.clear()
    assert len({text for text, _ in printed}) == 1
    assert [streamed for _, streamed in printed] == [False, True, True, False]
    assert cli.main([*command[:-2], "--beams", "2", "--stream"]) == 2
    assert "stream: only a single text" in capsys.readouterr().err


def test_a_blank_parts_the_prompt_from_what_is_written(tmp_path: Path) -> None:
    """WordPiece has no blanks of its own: whether one belongs there, only the tokens before tell."""
    text = "the captain looked at the sea and the sea looked back at the captain"
    tokenizer = train([text] * 9, TokenizerConfig(kind="wordpiece", vocab_size=300))
    model = make_model(resolve(ModelConfig(family="decoder", size="tiny", width=32)), tokenizer.vocab_size)
    save_bundle(Bundle(model, tokenizer), tmp_path / "bundle")
    bundle = load(tmp_path / "bundle")
    ids = tokenizer.encode("looked at")
    for seed in range(5):
        settings = GenerationConfig(max_new_tokens=6, temperature=1.0, seed=seed)
        pieces: list[str] = []
        written = bundle.generate("looked at", settings, pieces.append)[0]
        again = tokenizer.encode(written)
        assert again[: len(ids)] == ids and written == tokenizer.decode(again) == "".join(pieces)
