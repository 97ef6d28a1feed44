"""Typed configs from YAML files and command-line options, and back to YAML.

jsonargparse converts and checks the values. What it does not do is done here, on the field types of the dataclass:
every mistake is one line that names the key, where it stands, and the nearest key or choice that exists.
"""

import dataclasses
import json
import re
import types
import typing
from argparse import ArgumentError
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from pipeline.errors import UserError

if typing.TYPE_CHECKING:
    from jsonargparse import ArgumentParser

Config = TypeVar("Config")
Fields = Mapping[str, Any]
Place = str  # "file:line", or the option as typed
SURROGATE_PAIR = r"\\ud[89ab]..\\ud[c-f].."  # how JSON escapes an emoji, which YAML reads as two broken characters


def build(config_class: type[Config], files: Iterable[Path], options: Mapping[str, str]) -> Config:
    """A config from files, the later winning, then from options given as text."""
    known = fields_of(config_class)
    read = [(path, keys_in(path, known)) for path in map(found, files)]
    places = {key: place for _, keys in read for key, place in keys.items()}
    for key in options:
        places[key] = f"--{key}"
        check_key(key, known, places[key])
    given = [path for path, keys in read if keys]  # jsonargparse refuses a file that sets nothing
    arguments = [*(f"--config={path}" for path in given), *(f"--{key}={value}" for key, value in options.items())]
    parser = make_parser(config_class, "")
    try:
        parsed = parser.parse_args(arguments)
        check_values(parsed.items(), known, places)
        values = parser.instantiate(parsed)
    except (ValueError, TypeError, ArgumentError) as error:
        raise UserError(explain(str(error), known, places)) from error
    return config_class(**{name: values[name] for name in typing.get_type_hints(config_class)})


def to_yaml(config: Any) -> str:
    """The YAML that builds this config again, every field written out."""
    return yaml.dump(dataclasses.asdict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)


class Dumper(yaml.SafeDumper):
    """Quotes what our reader takes for a number and PyYAML's does not, such as 1e3, and rare ends of lines."""


def represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
    except ValueError:
        if not re.search("[\x85\u2028\u2029]", text):
            return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


Dumper.add_representer(str, represent_text)


def make_parser(config_class: type, prog: str, example: str = "") -> "ArgumentParser":
    """The jsonargparse parser of a config; it can name no class or function to import, whatever a file says."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(
        docstring_parse_attribute_docstrings=True, instantiate_subclass_spec_in_any=False, import_path_denylist=["*"]
    )
    parser = ArgumentParser(prog=prog, exit_on_error=False, epilog=example)
    parser.add_argument("--config", action="config", help="A YAML file; several are merged, the later wins.")
    parser.add_class_arguments(config_class)
    return parser


# --- Words -------------------------------------------------------------------------------------------------------


def parse_words(words: Sequence[str], positional: Sequence[str], known: Mapping[str, Any]) -> dict[str, list[str]]:
    """The values typed for each key: lists take all words up to the next option, flags need none."""
    typed: dict[str, list[str]] = {}
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        if word == "--":  # what follows is never an option, whatever it looks like
            add_plain(typed, waiting, positional, known)
            break
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            check_key(key, known, f"--{key}")
            kind = known.get(key, Any)  # inside a dict a key may be anything
            values = [value] if equals else take_values(waiting, kind, one=key == "config" and bool(positional))
            if not values:
                raise UserError(f"--{key}: needs a value, {in_words(kind)}")
            typed.setdefault(key, []).extend(values)
        else:
            add_plain(typed, [word], positional, known)
    return typed


def take_values(waiting: deque[str], kind: Any, one: bool) -> list[str]:
    if bool in members(kind):
        return [waiting.popleft()] if waiting and waiting[0].lower() in ("true", "false") else ["true"]
    values: list[str] = []
    while waiting and not waiting[0].startswith("--") and not (values and (one or not is_list(kind))):
        values.append(waiting.popleft())
    return values


def add_plain(
    typed: dict[str, list[str]], words: Iterable[str], positional: Sequence[str], known: Mapping[str, Any]
) -> None:
    """Give each word to the first positional field that has room for it."""
    for word in words:
        name = next((name for name in positional if name not in typed or is_list(known[name])), None)
        if name is None:
            raise UserError(f"{word!r}: more than this command takes without a --KEY; see its --help")
        typed.setdefault(name, []).append(word)


def as_option(values: list[str], kind: Any, plain: bool = False) -> str:
    """The value of a key as jsonargparse reads it; of a single value typed twice the last counts.

    `plain` words are text, whatever they look like; others may be a list in YAML.
    """
    written_as_list = len(values) == 1 and values[0].startswith("[") and values[0].endswith("]") and not plain
    if not is_list(kind) or written_as_list:
        return values[-1]
    return re.sub(SURROGATE_PAIR, lambda pair: json.loads(f'"{pair[0]}"'), json.dumps(values))


# --- Fields ------------------------------------------------------------------------------------------------------


def fields_of(config_class: type, prefix: str = "") -> dict[str, Any]:
    """All keys of a config, nested ones with dots, and their types."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(config_class).items():
        found[prefix + name] = kind
        for member in members(kind):
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                found |= fields_of(member, f"{prefix}{name}.")
    return found


def is_list(kind: Any) -> bool:
    return any(typing.get_origin(member) in (list, tuple) for member in members(kind))


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def choices(kind: Any) -> list[str]:
    return [str(value) for member in members(kind) if typing.get_origin(member) is Literal for value in member.__args__]


def in_words(kind: Any) -> str:
    """A type as people say it."""
    if choices(kind):
        return "one of " + ", ".join(choices(kind))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    lists = {member: "a list" for member in members(kind) if typing.get_origin(member) in (list, tuple)}
    return " or ".join((names | lists).get(member, "a section of keys") for member in members(kind))


# --- Mistakes ----------------------------------------------------------------------------------------------------


def check_key(key: str, known: Fields, place: Place) -> None:
    """Refuse a key that no field has, and name the nearest that exists."""
    parts = key.split(".")
    above = {".".join(parts[:n]): ".".join(parts[n:]) for n in range(1, len(parts))}
    inside = next((name for name in above if typing.get_origin(known.get(name)) is dict), None)
    if key not in known and inside is None:
        raise UserError(f"{place}: unknown key {key!r}{suggestion(key, list(known))}")
    if inside and known[inside] == dict[str, str] and "." in above[inside] and place == f"--{key}":
        raise UserError(f"{place}: {inside} takes keys with dots as one value: --{inside} '{{{above[inside]}: \"…\"}}'")


def check_values(values: Iterable[tuple[str, Any]], known: Fields, places: Mapping[str, Place]) -> None:
    """Refuse null where a field has to have a value, which jsonargparse takes for any type, and text that is none."""
    for key, value in values:
        place = places.get(key, "config")
        if value is None and key in known and type(None) not in members(known[key]):
            raise UserError(f"{place}: {key} must be {in_words(known[key])}, not null")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and re.search(r"[\x00\ud800-\udfff]", text):  # no name of a file, and no YAML
                raise UserError(f"{place}: {text!r:.80} is not UTF-8 text; rename what it names")


def suggestion(word: str, candidates: list[str]) -> str:
    close = get_close_matches(word, candidates, n=1, cutoff=0.5)
    if not close:  # a key typed without its section, or the other way round
        last = word.rsplit(".", 1)[-1]
        close = [name for name in candidates if name.rsplit(".", 1)[-1] == last]
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(message: str, known: Fields, places: Mapping[str, Place]) -> str:
    """One line from what jsonargparse says in several."""
    if missing := re.search(r"arguments are required: (.+)", message):
        names = missing[1].split(", ")
        return f"{names[0]}: required; give it as --{names[0]}, or in a --config file"
    if not (named := re.search(r'key "([\w.]+)"', message)):
        return " ".join(message.split())
    key = named[1]
    kind = known.get(key, Any)
    got = re.search(r"(?:Got|Given) value: (.*)", message)
    value = got[1].strip() if got else ""
    hint = suggestion(value, choices(kind)) if choices(kind) else ""
    place = places.get(key) or next((place for name, place in places.items() if name.startswith(key + ".")), "config")
    return f"{place}: {key} must be {in_words(kind)}, not {value!r:.80}{hint}"


# --- Files -------------------------------------------------------------------------------------------------------

SHIPPED = (Path(__file__).parent, Path(__file__).parent.parent)  # where configs/ is in a wheel, and in a clone


def found(path: Path) -> Path:
    """A config file as it is named; one that begins with configs/ and is not here is the one that came with us."""
    candidates = (root / path for root in SHIPPED if path.parts[:1] == ("configs",))
    return path if path.exists() else next((one for one in candidates if one.is_file()), path)


class PlainLoader(yaml.SafeLoader):
    """Refuses aliases, a few lines of which can stand for more values than fit in memory, and tags, which name code."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases such as *name are not allowed")
        node = super().compose_node(parent, index)
        if node and (not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag):
            problem = f"tags such as {node.tag!r:.60} are not allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node


def keys_in(path: Path, known: Fields) -> dict[str, Place]:
    """Where each key of a YAML file stands; unknown and repeated keys are refused."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=PlainLoader)
    except FileNotFoundError as error:
        beside = sorted({one.stem for root in (Path(), *SHIPPED) for one in (root / path.parent).glob("*.yaml")})
        raise UserError(f"{path}: no such config file{suggestion(path.stem, beside)}") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, not a config file") from error
    except ValueError as error:
        raise UserError(f"{path}: a config file must be UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error})") from error
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply for a config file") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: a config file holds keys and values, such as `seed: 1`")
    places: dict[str, Place] = {}
    for key, value, line in walk(node, ""):
        place = f"{path}:{line}"
        if key in places:
            raise UserError(f"{place}: {key!r} is set twice in this file (first at {places[key]})")
        check_key(key, known, place)
        if dataclasses.is_dataclass(known.get(key)) and not isinstance(value, yaml.MappingNode):
            raise UserError(f"{place}: {key} must be a section of keys, not {value.value!r:.80}")
        places[key] = place
    return places


def walk(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, yaml.Node, int]]:
    """Every key below a node with dots, its value, and its line."""
    for name, value in node.value:
        key = f"{prefix}{name.value}"
        yield key, value, name.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from walk(value, f"{key}.")
