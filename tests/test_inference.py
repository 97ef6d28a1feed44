"""Using a bundle: what is written is shown as it is written, and is the same text."""

from pathlib import Path

import pytest

from pipeline import cli
from pipeline.bundle import Bundle, make_model, save_bundle
from pipeline.config import GenerationConfig
from pipeline.data.config import TokenizerConfig
from pipeline.data.tasks import Row
from pipeline.errors import UserError
from pipeline.inference import load, pass_over
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


@pytest.mark.parametrize("content", ["some notes\nof mine\n", "some notes", "[1]\n"])
def test_a_file_without_predictions_is_not_gone_on_with(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=r"notes.txt: .* it holds no predictions: choose another --output"):
        pass_over(path, iter([Row("a"), Row("b")]))
    assert path.read_text() == content


@pytest.mark.parametrize("cut", ['{"row": 1, "sou', '{"r', ""])
def test_a_last_prediction_that_was_cut_off_is_made_again(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"row": 0, "source": "a", "text": "x"}\n' + cut)
    rows = iter([Row("a"), Row("b")])
    assert pass_over(path, rows) == 1 and next(rows) == Row("b")
    assert path.read_text() == '{"row": 0, "source": "a", "text": "x"}\n'


def test_embed_names_its_own_key_for_a_missing_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text('{"body": "x"}\n')
    tokenizer = train(["x"], TokenizerConfig(kind="byte"))
    model = make_model(resolve(ModelConfig(family="encoder", size="tiny", width=32)), tokenizer.vocab_size)
    save_bundle(Bundle(model, tokenizer), tmp_path / "bundle")
    command = ["embed", str(tmp_path / "bundle"), "--input", str(table), "--output", str(tmp_path / "x.npy")]
    assert cli.main(command) == 2
    assert capsys.readouterr().err.endswith("row 1: no column 'text'; it has body: choose one with --column\n")


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
