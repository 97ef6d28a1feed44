"""Writes docs/configuration.md from the dataclasses: `make docs`."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from pathlib import Path
from typing import Any

import yaml

from pipeline.cli import COMMANDS, example_of, first_line, load
from pipeline.configuration import in_words, members

PAGE = Path(__file__).parent / "configuration.md"
INTRODUCTION = """\
# Configuration reference

This page is made from the dataclasses by `make docs`; a test fails if it is out of date.

Keys stand in YAML files, nested, or on the command line with dots:

```
triptych pretrain --config configs/pretrain/decoder.yaml --config mine.yaml --data.batch_size 16 --print_config
```

```yaml
# mine.yaml
data:
  corpus: [my-novels]
  batch_size: 32
```

Several files merge, the later wins, and what is typed wins over files; lists are replaced, not joined. A file that is
named `configs/…` and is not in the working folder is the one that came with Triptych: configs work the same in a
clone and after `pip install`. `--print_config` shows the result without running it. Unknown keys, wrong types and
contradictions are refused in one line that names the file and the line.

"""


def page() -> str:
    """The whole reference: every command with its keys, then every section once."""
    commands = {name: load(f"pipeline.{command.config}") for name, command in COMMANDS.items()}
    parts = [INTRODUCTION, "## Commands\n\n"]
    for name, config in commands.items():
        example = f"```\n{example_of(name)}\n```\n\n"
        words = COMMANDS[name].positional
        unnamed = f"Without a `--KEY`: {', '.join(f'`{word}`' for word in words)}.\n\n" if words else ""
        parts.append(f"### triptych {name}\n\n{first_line(config)}\n\n{example}{unnamed}{table(config)}")
    parts.append("## Sections\n\n")
    for config in sections(commands.values()):
        parts.append(f"### {config.__name__}\n\n{first_line(config)}\n\n{table(config)}")
    return "".join(parts)


def sections(configs: typing.Iterable[Any]) -> list[Any]:
    """The dataclasses that stand inside others, in the order in which they are met."""
    found: dict[Any, None] = {}
    for config in configs:
        for kind in typing.get_type_hints(config).values():
            inner = section(kind)
            if inner:
                found |= dict.fromkeys([inner, *sections([inner])])
    return list(found)


def section(kind: Any) -> Any:
    return next((member for member in members(kind) if dataclasses.is_dataclass(member)), None)


def table(config: Any) -> str:
    """The keys of a dataclass, what they take, and what they mean."""
    kinds, meanings = typing.get_type_hints(config), attribute_docstrings(config)
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(config):
        inner = section(kinds[field.name])
        takes = f"[{inner.__name__}](#{inner.__name__.lower()})" if inner else in_words(kinds[field.name])
        cells = (f"`{field.name}`", takes, "" if inner else default(field), meanings[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
    return "\n".join(rows) + "\n\n" if len(rows) > 2 else ""


def default(field: dataclasses.Field[Any]) -> str:
    """A default as it is written in YAML, or that there is none."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value = list(value) if isinstance(value, tuple) else value
    written = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    return f"`{written}`"


def attribute_docstrings(config: Any) -> dict[str, str]:
    """The string after each field, of a class and those that it inherits from."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
