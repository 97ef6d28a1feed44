"""What people type, and what they are told when it is wrong."""

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline import cli
from pipeline.configuration import fields_of, parse_words
from pipeline.errors import UserError
from tests.novels import novel

PROJECT = Path(__file__).parent.parent


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def said(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line of an error; checks that it is one, and the exit code."""
    captured = capsys.readouterr()
    assert code == 2
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in captured.err
    return lines[0]


# --- Help ---


def test_help_is_light() -> None:
    """No library that takes time to import is touched before a stage runs."""
    heavy = "{'torch', 'pytorch_lightning', 'numpy', 'datasets', 'tokenizers', 'wandb', 'rich', 'pyarrow'}"
    code = f"""
import sys
from pipeline import cli
assert cli.main(sys.argv[1:]) == 0
assert not {heavy} & set(sys.modules)
"""
    everything = "prepare --corpus x --tokenizer y --output z --print_config"
    for arguments in ("--help", "tokenizer train --help", everything):
        done = subprocess.run([sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == run() == run("-h") == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert run("tokenizer", "--help") == 0
    assert "prepare" not in capsys.readouterr().out
    assert run("--version") == 0


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*name.split(), "--help") == 0
    text = capsys.readouterr().out
    assert "Example: triptych " + name in " ".join(text.split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_example_of_every_command_can_be_parsed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(cli.example_of(name))[1:]
    assert run(*words, "--print_config") == 0
    assert capsys.readouterr().err == ""


# --- Words ---

KNOWN = {"corpus": list[str], "limit": int | None, "clean": bool, "name": str, "config": list[str]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--corpus a b --limit 3", {"corpus": ["a", "b"], "limit": ["3"]}),
        ("--corpus=a --corpus b c", {"corpus": ["a", "b", "c"]}),
        ("a b --clean c", {"corpus": ["a", "b", "c"], "clean": ["true"]}),
        ("--clean false a", {"clean": ["false"], "corpus": ["a"]}),
        ("--limit -1 a", {"limit": ["-1"], "corpus": ["a"]}),
        ("--config x.yaml a --config y.yaml", {"config": ["x.yaml", "y.yaml"], "corpus": ["a"]}),
        ("a -- --name", {"corpus": ["a", "--name"]}),
        ("[ab]*.txt", {"corpus": ["[ab]*.txt"]}),
    ],
)
def test_words_become_values(words: str, expected: dict[str, list[str]]) -> None:
    assert parse_words(words.split(), ["corpus"], KNOWN) == expected


def test_several_configs_after_one_option() -> None:
    assert parse_words(["--config", "a", "b"], [], KNOWN) == {"config": ["a", "b"]}


def test_words_go_to_positional_fields_in_order() -> None:
    typed = parse_words(["x", "--limit", "3", "a", "b"], ["name", "corpus"], KNOWN)
    assert typed == {"name": ["x"], "limit": ["3"], "corpus": ["a", "b"]}
    with pytest.raises(UserError, match="'y': more than this command takes"):
        parse_words(["x", "y"], ["name"], KNOWN)


@pytest.mark.parametrize(
    "text", ["😀 lovely", "[laughs]", "[spoiler alert, do not read]", "a\u2028b", "\\ud83d\\ude00", "\x7f"]
)
def test_words_without_an_option_are_texts_whatever_they_look_like(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("predict", "bundle", text, text, "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["texts"] == [text, text]
    assert run("predict", "bundle", text, "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["texts"] == [text]


def test_a_pair_of_numbers_is_typed_like_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    for values in (["0.8", "0.95"], ["[0.8, 0.95]"]):
        assert run("pretrain", "--data.corpus", "x", "--optim.betas", *values, "--print_config") == 0
        assert "betas:\n  - 0.8\n  - 0.95\n" in capsys.readouterr().out


def test_options_win_over_configs_wherever_they_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("vocab_size: 300\nkind: unigram\n")
    assert run("tokenizer", "train", "--vocab_size", "400", "--config", tmp_path / "a.yaml", "--corpus", "x y", "1e3",
               "--output", "o", "--print_config") == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "vocab_size: 400" in text and "kind: unigram" in text and '- x y\n- "1e3"' in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tokeniser train", "no command 'tokeniser train'; did you mean 'tokenizer train'?"),
        ("tokenizer trian", "no command 'tokenizer trian'; did you mean 'tokenizer train'?"),
        ("--nonsense", "no command '--nonsense'"),
        ("prepare x", "'x': more than this command takes"),
        ("prepare --corpsu x", "unknown key 'corpsu'; did you mean 'corpus'?"),
        ("prepare --corpus", "--corpus: needs a value, a list"),
        ("prepare --corpus x --tokenizer y", "output: required"),
        ("tokenizer train --vocab-size many", "--vocab_size: vocab_size must be a whole number, not 'many'"),
        ("tokenizer train --kind bpf", "wordpiece, character, byte, not 'bpf'; did you mean 'bpe'?"),
        ("tokenizer train --lowercase=maybe", "lowercase must be true or false, not 'maybe'"),
        ("corpus inspect x --limit 0", "limit: 0 documents"),
        ("compare --tasks x --task_options.optim.lr 1", """with dots as one value: --task_options '{optim.lr: "…"}'"""),
        ("corpus inspect x --validation_fraction 0.9 --test_fraction 0.1", "leave something to train on"),
        ("corpus inspect x --workers -2", "workers: -2 is negative"),
        ("corpus inspect --corpus []", "corpus: nothing to read"),
        ("corpus inspect --config nowhere.yaml x", "nowhere.yaml: no such config file"),
        ("data get novls", "novls"),
        ("data list --print_config=yes", "--print_config: yes is neither true nor false"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_exit_code_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, run(*words.split()))


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("corpus", "inspect", "nowhere", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere/x.bin")

    monkeypatch.setattr("pipeline.stages.list_data", full)
    line = said(capsys, run("data", "list"))
    assert "No space left on device: somewhere/x.bin" in line and "kept" in line


def test_ctrl_c_is_one_line_and_not_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.stages.list_data", stop)
    assert run("data", "list") == 1
    assert capsys.readouterr().err.startswith("interrupted")


# --- The whole way ---


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("novels")
    for seed in range(8):
        (folder / f"book-{seed}.txt").write_text(novel(seed))
    return folder


def triptych(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=120)


def test_novels_to_tokenizer_to_store(novels: Path, tmp_path: Path) -> None:
    """One process per command, as people run them."""
    listed = triptych("data", "list")
    assert listed.returncode == 0 and "licence" in listed.stdout
    assert triptych("data", "get", "nothing-like-it").returncode == 2
    inspected = triptych("corpus", "inspect", novels, "--validation_books", "book-3")
    assert inspected.returncode == 0, inspected.stderr
    assert "book-7.txt" in inspected.stdout and "validation" in inspected.stdout
    settings: list[str | Path] = ["--corpus", novels, "--validation_books", "book-3"]
    tokenizer = tmp_path / "tokenizers" / "mine"
    trained = triptych("tokenizer", "train", *settings, "--vocab_size", "500", "--output", tokenizer)
    assert trained.returncode == 0, trained.stderr
    assert {path.name for path in tokenizer.iterdir()} == {"tokenizer.json", "meta.json", "config.yaml"}
    compared = triptych("tokenizer", "compare", tokenizer, "--text", novels / "book-3.txt")
    assert compared.returncode == 0 and "mine" in compared.stdout
    prepared = triptych("prepare", *settings, "--tokenizer", tokenizer, "--output", tmp_path / "stores")
    assert prepared.returncode == 0, prepared.stderr
    (store,) = (path for path in (tmp_path / "stores").iterdir() if path.is_dir())
    assert str(store) in prepared.stdout
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["tokenizer"] == json.loads((tokenizer / "meta.json").read_text())["tokenizer_fingerprint"]
    assert (store / "config.yaml").exists()
    made_by = (store / "config.yaml").read_text()
    again = triptych("prepare", "--config", store / "config.yaml", "--workers", "1")
    assert (store / "config.yaml").read_text() == made_by
    assert again.returncode == 0 and str(store) in again.stdout


def test_work_goes_on_when_nobody_reads_along(novels: Path, tmp_path: Path) -> None:
    """As under `2>&1 | tee` when tee dies; python -u writes every line at once."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = ["tokenizer", "train", "--corpus", novels, "--kind", "byte", "--output", tmp_path / "byte"]
    command = [sys.executable, "-u", "-m", "pipeline", *map(str, words)]
    done = subprocess.run(command, stdout=write_end, stderr=write_end, cwd=PROJECT, timeout=120)
    os.close(write_end)
    assert done.returncode == 0 and (tmp_path / "byte" / "meta.json").is_file()


@pytest.mark.parametrize(("raised", "code"), [("sys.stdout.write('x' * 10**6)", 0), ("raise BrokenPipeError", 1)])
def test_only_a_reader_who_has_seen_enough_ends_a_command_well(raised: str, code: int) -> None:
    program = f"""
import sys
from pipeline import cli, stages
def end(_):
    {raised}
stages.list_data = end
sys.exit(cli.main(["data", "list"]))
"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    out = subprocess.DEVNULL if code else write_end
    done = subprocess.run([sys.executable, "-c", program], stdout=out, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert done.returncode == code and done.stderr.startswith("error: " if code else "")


def test_a_tokenizer_in_the_way_is_never_overwritten(
    novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: list[str | Path] = ["tokenizer", "train", "--corpus", novels, "--workers", "1"]
    settings += ["--output", tmp_path, "--kind", "byte"]
    assert run(*settings) == 0
    before = (tmp_path / "tokenizer.json").read_bytes()
    assert run(*settings) == 0 and (tmp_path / "tokenizer.json").read_bytes() == before
    assert "other settings" in said(capsys, run(*settings, "--lowercase"))
    (tmp_path / "meta.json").unlink()  # as in a folder of somebody else's model
    assert "other settings" in said(capsys, run(*settings))
    assert (tmp_path / "tokenizer.json").read_bytes() == before


def test_a_tokenizer_that_was_killed_while_it_was_written_is_written_again(
    novels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its files in turn."""
    words: list[str | Path] = ["tokenizer", "train", "--corpus", novels, "--workers", "1", "--kind", "byte"]
    replace, written = Path.replace, 0

    def killed(path: Path, target: Path) -> Path:
        nonlocal written
        written += 1
        if written == number:
            raise RuntimeError("killed")
        return replace(path, target)

    for number in (1, 2, 3, 4):
        output, written = tmp_path / str(number), 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            with pytest.raises(RuntimeError, match="killed"):
                run(*words, "--output", output)
        assert run(*words, "--output", output) == 0
        assert {"tokenizer.json", "meta.json"} <= {path.name for path in output.iterdir()}


def test_tokenizers_are_compared_on_text_only(novels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tmp_path / "byte"
    assert run("tokenizer", "train", "--corpus", novels, "--workers", "1", "--output", tokenizer, "--kind", "byte") == 0
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 9)
    assert "no text in it" in said(capsys, run("tokenizer", "compare", tokenizer, "--text", tmp_path / "x.bin"))
    (tmp_path / "x.jsonl").write_text('{"body": "some words"}\n')
    assert run("tokenizer", "compare", tokenizer, "--text", tmp_path / "x.jsonl", "--text_column", "body") == 0


def test_every_key_of_every_command_is_known_to_the_parser() -> None:
    for command in cli.COMMANDS.values():
        known = fields_of(cli.load(f"pipeline.{command.config}"))
        assert set(command.positional) <= set(known)
        assert callable(cli.load(f"pipeline.stages:{command.stage}"))
    with pytest.raises(UserError):
        cli.find_command(["nonsense"])
