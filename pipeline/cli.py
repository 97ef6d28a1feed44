"""The command line: find the command, parse its options into a typed config, call its stage, turn errors into a line.

Nothing heavy is imported before a stage runs, so that help and mistakes are answered at once.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.configuration import as_option, build, fields_of, make_parser, parse_words, suggestion, to_yaml
from pipeline.errors import Stopped, UserError, is_out_of_memory

STOPPED = 75  # "try again later": ended by a signal after saving


@dataclass(frozen=True)
class Command:
    """One thing people type: the config it takes, the stage it calls, and an example."""

    config: str
    stage: str
    positional: tuple[str, ...]
    """The fields that words without an option go to, in order; a list takes all that are left."""
    example: str
    """What may follow its name."""


COMMANDS: dict[str, Command] = {
    "data list": Command("data.config:DataListConfig", "list_data", (), ""),
    "data get": Command("data.config:DataGetConfig", "get_data", ("name",), "novels-gutenberg"),
    "corpus inspect": Command("data.config:InspectConfig", "inspect_corpus", ("corpus",),
        "my-novels/ --test_fraction 0.1"),
    "tokenizer train": Command("data.config:TokenizerTrainConfig", "train_tokenizer", (),
        "--corpus my-novels/ --kind bpe --vocab_size 8192 --output tokenizers/mine"),
    "tokenizer compare": Command("data.config:TokenizerCompareConfig", "compare_tokenizers", ("tokenizers",),
        "tokenizers/mine tokenizers/other --text held-out.txt"),
    "prepare": Command("data.config:PrepareConfig", "prepare", (),
        "--corpus my-novels/ --tokenizer tokenizers/mine --output stores"),
    "pretrain": Command("training.config:PretrainConfig", "pretrain", (),
        "--config configs/pretrain/decoder.yaml --data.corpus my-novels/"),
    "finetune": Command("training.config:FinetuneConfig", "finetune", (),
        "--config configs/finetune/sentiment.yaml --init_from runs/mine/bundle"),
    "evaluate": Command("config:EvaluateConfig", "evaluate", ("bundle",),
        "runs/mine/bundle --data test.jsonl --json scores.json"),
    "predict": Command("config:PredictConfig", "predict", ("bundle", "texts"),
        'runs/mine/bundle "What a wonderful film" --output out.jsonl'),
    "embed": Command("config:EmbedConfig", "embed", ("bundle", "texts"),
        "runs/mine/bundle --input texts.txt --output texts.npy"),
    "generate": Command("config:GenerateConfig", "generate", ("bundle", "prompt"),
        'runs/mine/bundle "It was a dark night" --max_new_tokens 60 --temperature 0.8 --seed 1'),
    "attention": Command("config:AttentionConfig", "draw_attention", ("bundle", "text"),
        'runs/mine/bundle "It was a <mask> night" --output maps'),
    "compare": Command("evaluation.config:StudyConfig", "compare", (),
        "--config configs/study/encoder-vs-decoder.yaml --run_dir studies/mine"),
    "runs": Command("training.config:RunsConfig", "list_runs", ("folder",), "runs"),
    "bundle": Command("training.config:RunBundleConfig", "bundle_run", ("run",), "runs/mine --step 2000"),
    "sync": Command("training.config:SyncConfig", "sync_runs", ("folders",), "runs/mine"),
    "import": Command("config:ImportConfig", "import_bundle", ("source", "bundle"),
        "hf:google-bert/bert-base-uncased bundles/bert"),
    "export": Command("config:ExportConfig", "export_bundle", ("bundle", "folder"), "bundles/bert exported/bert"),
}  # fmt: skip


def entry() -> None:
    """The `triptych` program."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command; 0 done, 2 the user's mistake in one line, 75 stopped after saving, 1 anything else."""
    debug = "--debug" in arguments
    os.umask(os.umask(0o077) | 0o002)  # whatever the user's is, what we make is not for all to write
    try:
        run([argument for argument in arguments if argument != "--debug"])
        sys.stdout.flush()
    except UserError as error:
        return fail(str(error), debug)
    except Stopped as stopped:
        return 0 if stopped.requeued else STOPPED
    except BrokenPipeError as error:
        from pipeline.terminal import is_closed  # heavy

        if not is_closed(sys.stdout):  # it was not the reader of our results, who had seen enough
            fail(describe(error), debug)
            return 1
    except OSError as error:
        return fail(describe(error), debug)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return fail("out of memory; what is finished is kept: choose a smaller model, batch or file", debug)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what is finished is kept, the same command goes on from there\n")
        return 1
    return 0


def run(arguments: list[str]) -> None:
    name, rest = find_command(arguments)
    if name not in COMMANDS:
        sys.stdout.write(overview(name))
        return
    command = COMMANDS[name]
    config_class = load(f"pipeline.{command.config}")
    if "--help" in rest or "-h" in rest:
        print_help(name, command, config_class)
        return
    known = fields_of(config_class)
    typed = parse_words(rest, command.positional, known | {"config": list[str], "print_config": bool})
    files = [Path(name) for name in typed.pop("config", [])]
    if "resume" in typed:
        files.insert(0, settings_of(Path(typed["resume"][-1])))
    if (shown := typed.pop("print_config", ["false"])[-1].lower()) not in ("true", "false"):
        raise UserError(f"--print_config: {shown} is neither true nor false; leave it out")
    plain = {"--" + key for key in command.positional} - set(rest)
    options = {key: as_option(values, known.get(key, Any), "--" + key in plain) for key, values in typed.items()}
    config = build(config_class, files, options)
    if shown == "true":
        sys.stdout.write(to_yaml(config))
        return
    load(f"pipeline.stages:{command.stage}")(config)


def settings_of(run: Path) -> Path:
    """The settings that a run was started with, on which those typed now come on top."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"--resume: {run} is no run (it has no config.yaml); `triptych runs FOLDER` lists runs")
    return run / "config.yaml"


def fail(message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write("error: " + " ".join(message.split()) + "\n")
    return 2


def describe(error: OSError) -> str:
    """What the system refused, where, and that nothing finished is lost."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}; what is finished is kept: mend this and run the same command again"


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# --- Commands and help -------------------------------------------------------------------------------------------


def find_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name and what follows it; a group's name or nothing asks for the overview."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments[:2]))
    for count in (2, 1):
        name = " ".join(words[:count])
        if len(words) >= count and name in COMMANDS:
            return name, arguments[count:]
    rest = arguments[len(words) :]
    if "--version" in arguments[:1]:
        return "--version", []
    asked_for_help = not rest or rest[0] in ("-h", "--help")
    known = not words or (len(words) == 1 and any(name.startswith(words[0] + " ") for name in COMMANDS))
    if known and asked_for_help:
        return " ".join(words), []
    typed = " ".join(words) or arguments[0]
    raise UserError(f"no command {typed!r}{suggestion(typed, list(COMMANDS))}; `triptych --help` lists them")


def overview(group: str) -> str:
    """The list of commands, of one group or of all."""
    if group == "--version":
        return f"triptych {__version__}\n"
    names = [name for name in COMMANDS if name.startswith(group)]
    width = max(map(len, names)) + 2
    lines = [f"  {name:{width}}{first_line(load(f'pipeline.{COMMANDS[name].config}'))}" for name in names]
    usage = f"usage: triptych {group or 'COMMAND'} [--config FILE …] [--KEY VALUE …] [--print_config] [--debug]"
    what = "Raw novels to pretrained, fine-tuned and fairly compared transformers of three families."
    more = "`triptych COMMAND --help` shows the keys of a command and an example.\n"
    return "\n".join([usage, "", what, "", *lines, "", more])


def first_line(described: Any) -> str:
    return str(described.__doc__).splitlines()[0]


def example_of(name: str) -> str:
    """A whole line that one could type."""
    return f"triptych {name} {COMMANDS[name].example}".strip()


def print_help(name: str, command: Command, config_class: type) -> None:
    words = " and ".join(command.positional)
    example = f"Example: {example_of(name)}" + (f" ({words} need no --KEY)" if words else "")
    make_parser(config_class, f"triptych {name}", example=example).print_help()
