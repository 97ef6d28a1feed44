"""Bundles: what goes in comes out, and damage is noticed."""

import json
from pathlib import Path

import pytest
import torch

from pipeline import cli
from pipeline.bundle import Bundle, load_bundle, make_model, save_bundle
from pipeline.data.config import TokenizerConfig
from pipeline.errors import UserError
from pipeline.files import read_json, write_sealed
from pipeline.model.config import Family, ModelConfig, resolve
from pipeline.tokenizer import Tokenizer, train
from tests.novels import novel


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([novel(1)], TokenizerConfig(vocab_size=400), "a corpus")


def make(tokenizer: Tokenizer, family: Family = "decoder", tied: bool = True) -> Bundle:
    config = ModelConfig(family=family, size="tiny", tie_embeddings=tied, zero_output=False)
    return Bundle(make_model(resolve(config), tokenizer.vocab_size).eval(), tokenizer, {"parent": "a run"})


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder", "recurrent"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_bundle_comes_back_as_it_was(family: Family, tied: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    bundle = make(tokenizer, family, tied)
    save_bundle(bundle, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.safetensors", "config.yaml", "tokenizer.json", "meta.json"
    }  # fmt: skip
    loaded = load_bundle(tmp_path)
    assert loaded.model.architecture == bundle.model.architecture
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.meta["parent"] == "a run" and loaded.meta["corpus_fingerprint"] == "a corpus"
    for name, tensor in bundle.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    assert (loaded.model.head.output.weight is loaded.model.embedding.weight) == tied


def test_a_bundle_is_complete_only_with_its_record(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bundle(make(tokenizer), tmp_path)
    monkeypatch.setattr("pipeline.bundle.write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        save_bundle(make(tokenizer), tmp_path)
    assert not (tmp_path / "meta.json").exists()


def test_a_machine_without_git_saves_bundles_too(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    save_bundle(make(tokenizer), tmp_path / "bundle")
    assert load_bundle(tmp_path / "bundle").meta["git_commit"] is None


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("meta.json", None, "no bundle"),
        ("meta.json", b"{}", "not a bundle of format 1"),
        ("meta.json", b"{", "not valid JSON"),
        ("model.safetensors", None, "missing or damaged"),
        ("model.safetensors", b"zero", "missing or damaged"),
        ("config.yaml", b"model:\n  width: 3\n", "missing or damaged"),
        ("config.yaml", None, "missing or damaged"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", b"{}", "tokenizer"),
    ],
)
def test_damage_is_one_line_with_exit_code_2(
    file: str,
    damage: bytes | None,
    message: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_bundle(make(tokenizer), tmp_path)
    if damage is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(damage)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_a_config_that_asks_for_more_than_the_weights_costs_no_memory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Also where the checksums agree, as one who means harm would see to."""
    save_bundle(make(tokenizer), tmp_path)
    config = (tmp_path / "config.yaml").read_text()
    for wrong in ("feed_forward: 16000000", "feed_forward: 64"):
        (tmp_path / "config.yaml").write_text(config.replace("feed_forward: 512", wrong))
        write_sealed(tmp_path / "meta.json", read_json(tmp_path / "meta.json") | {"config_sha256": None})
        with pytest.raises(UserError, match="not the weights of the model that config.yaml describes"):
            load_bundle(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_bundle(make(tokenizer), tmp_path)
    other = train([novel(2)], TokenizerConfig(vocab_size=400))
    (tmp_path / "tokenizer.json").write_text(other.text)
    with pytest.raises(UserError, match="not what meta.json beside it describes"):
        load_bundle(tmp_path)
    assert json.loads((tmp_path / "meta.json").read_text())["tokenizer_fingerprint"] == tokenizer.fingerprint


def test_a_bundle_goes_to_transformers_and_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ModelConfig(family="decoder", preset="gpt2", size="tiny")
    bundle = Bundle(make_model(resolve(config), tokenizer.vocab_size).eval(), tokenizer)
    save_bundle(bundle, tmp_path / "bundle")
    assert cli.main(["export", str(tmp_path / "bundle"), str(tmp_path / "exported")]) == 0
    assert cli.main(["import", str(tmp_path / "exported"), str(tmp_path / "back")]) == 0
    ids = torch.arange(9)[None]
    again = load_bundle(tmp_path / "back").model
    torch.testing.assert_close(again.logits(again.decode(ids)), bundle.model.logits(bundle.model.decode(ids)))
