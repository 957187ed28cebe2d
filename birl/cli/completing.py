"""`birl completion SHELL`: what the shells know of every command."""

from collections.abc import Sequence

from birl.cli.commands import ALL, CONFIGURED
from birl.cli.configured import flags_of
from birl.completion import command

USAGE = command.USAGE


def run(words: Sequence[str]) -> int:
    """Raises `BirlError`."""
    offered = {one.name: one.offered for one in ALL if one.offered} | {name: flags_of(name) for name in CONFIGURED}
    return command.run(words, {one.name: one.brief for one in ALL}, offered)
