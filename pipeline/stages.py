"""One plain function per command, each a short list of named steps. Read this first."""

from pipeline.data import catalogue
from pipeline.data.config import (
    DataGetConfig,
    DataListConfig,
    InspectConfig,
)
from pipeline.data.corpus import scan
from pipeline.data.inspection import print_corpus
from pipeline.terminal import print_table, say


def list_data(_: DataListConfig) -> None:
    """Show the catalogue."""
    print_table("Catalogue", catalogue.HEADER, catalogue.rows())


def get_data(config: DataGetConfig) -> None:
    """Fetch a catalogue entry and print its folder."""
    say(str(catalogue.get(config.name)))


def inspect_corpus(config: InspectConfig) -> None:
    """Show what is in a corpus and what would become of it."""
    print_corpus(scan(config))
