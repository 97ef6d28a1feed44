"""Configs from files and options, and back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.configuration import build, fields_of, to_yaml
from pipeline.data.config import TokenizerTrainConfig
from pipeline.errors import UserError
from pipeline.evaluation.config import StudyConfig
from pipeline.training.config import FinetuneConfig, PretrainConfig
from pipeline.training.run import flat


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    width: int = 8
    rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A config with a section."""

    name: str
    kind: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    words: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_files_win_and_options_win_over_files(tmp_path: Path) -> None:
    one = write(tmp_path, "name: one\nwords: [a, b]\ninner:\n  width: 1\n  rate: 1e-4\n", "one.yaml")
    two = write(tmp_path, "inner:\n  width: 2\nwords: [c]\n", "two.yaml")
    config = build(Outer, [one, two], {"limit": "7"})
    assert config == Outer(name="one", words=["c"], limit=7, inner=Inner(width=2, rate=1e-4))
    assert build(Outer, [one], {"inner.width": "3"}).inner == Inner(width=3, rate=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nknid: fast\n", r"config.yaml:2: unknown key 'knid'; did you mean 'kind'\?"),
        ("name: x\ninner:\n  widht: 3\n", r"config.yaml:3: unknown key 'inner.widht'; did you mean 'inner.width'\?"),
        ("name: x\nwidth: 3\n", r"config.yaml:2: unknown key 'width'; did you mean 'inner.width'\?"),
        ("name: x\ninner:\n  width: wide\n", r"config.yaml:3: inner.width must be a whole number, not 'wide'"),
        ("name: x\nkind: fest\n", r"config.yaml:2: kind must be one of fast, slow, not 'fest'; did you mean 'fast'\?"),
        ("name: x\nlimit: soon\n", "config.yaml:2: limit must be a whole number or null, not 'soon'"),
        ("name: x\nwords: 3\n", "config.yaml:2: words must be a list, not '3'"),
        ("name: x\ninner: 3\n", "config.yaml:2: inner must be a section of keys, not"),
        ("name: x\nlimit: 1\nname: y\n", r"config.yaml:3: 'name' is set twice in this file \(first at .*:1\)"),
        ("limit: 1\n", "name: required; give it as --name"),
        ("- a\n- b\n", "config.yaml: a config file holds keys and values"),
        ("name: [x\nlimit: 1\n", r"config.yaml:2: not valid YAML"),
        ("name: !!python/object/apply:os.system ['true']\n", "config.yaml:1: .*tags such as .* are not allowed"),
        ("name: x\nwords: [!!python/name:os.system ]\n", "config.yaml:2: .*tags such as .* are not allowed"),
        ("name: x\ninner:\n  width: null\n", "config.yaml:3: inner.width must be a whole number, not null"),
        ("name: x\nkind: null\n", "config.yaml:2: kind must be one of fast, slow, not null"),
        ('name: "a\\0b"\n', "config.yaml:1: .* is not UTF-8 text"),
        ("name: &a x\nwords: [*a]\n", "aliases such as .* are not allowed"),
        ("name: x\nextra: {a: " + "[" * 5000 + "]" * 5000 + "}\n", "nested too deeply"),
    ],
)
def test_mistakes_name_the_key_the_place_and_the_nearest(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(Outer, [write(tmp_path, text)], {})
    assert "\n" not in str(caught.value)


def test_a_file_that_sets_nothing_is_no_mistake(tmp_path: Path) -> None:
    assert build(Outer, [write(tmp_path, "# later\n")], {"name": "x"}) == Outer(name="x")


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such config file"):
        build(Outer, [tmp_path / "none.yaml"], {})
    with pytest.raises(UserError, match="is a folder"):
        build(Outer, [tmp_path], {})
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="must be UTF-8"):
        build(Outer, [tmp_path / "bytes.yaml"], {})


def test_a_config_cannot_make_us_import_or_run_anything(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    call = f"{{class_path: subprocess.Popen, init_args: {{args: [touch, {marker}]}}}}"
    config = build(Outer, [write(tmp_path, f"name: x\nextra:\n  thing: {call}\n")], {})
    assert isinstance(config.extra["thing"], dict) and not marker.exists()
    with pytest.raises(UserError):
        build(Outer, [write(tmp_path, f"name: x\ninner: {call}\n")], {})
    assert not marker.exists()


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
TRICKY = st.sampled_from(
    [*"1e3 null true on 0x1f ~ [x] 1_000 .5 nan 1:30".split(), "", " ", "- a", "a: b", "a\x85b", "\u2028"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=TEXTS | TRICKY,
    words=st.lists(TEXTS | TRICKY, max_size=3),
    limit=st.none() | st.integers(-(10**9), 10**9),
    rate=st.floats(allow_nan=False, allow_infinity=False),
)
def test_yaml_gives_the_same_config_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, words: list[str], limit: int | None, rate: float
) -> None:
    config = Outer(name=name, words=words, limit=limit, kind="slow", inner=Inner(rate=rate))
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert build(Outer, [path], {}) == config


def test_every_field_has_a_help_text() -> None:
    """The attribute docstrings are the help; jsonargparse shows them."""
    from pipeline.configuration import make_parser

    text = make_parser(TokenizerTrainConfig, "x").format_help()
    for name in fields_of(TokenizerTrainConfig):
        described = text.split(f"--{name} ", 1)[1].split("(", 1)[0]
        assert len(described.split()) > 4, name


CONFIGS = sorted(Path(__file__).parent.parent.glob("configs/**/*.yaml"))
REQUIRED = {
    "tokenizer": {"corpus": "[x]", "output": "y"},
    "pretrain": {"data.corpus": "[x]"},
    "model": {"data.corpus": "[x]"},
    "finetune": {"task.name": "sentiment"},
    "study": {"tasks": "[x]"},
}
CLASSES: dict[str, type[Any]] = {
    "tokenizer": TokenizerTrainConfig,
    "pretrain": PretrainConfig,
    "model": PretrainConfig,
    "finetune": FinetuneConfig,
    "study": StudyConfig,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_of_the_project_can_be_built(path: Path) -> None:
    config_class = CLASSES[path.parent.name]
    written = flat(yaml.safe_load(path.read_text()) or {})
    given_elsewhere = {key: value for key, value in REQUIRED[path.parent.name].items() if key not in written}
    config: Any = build(config_class, [path], given_elsewhere)
    default: Any = build(config_class, [], REQUIRED[path.parent.name])
    assert config != default, "a config that changes nothing"
