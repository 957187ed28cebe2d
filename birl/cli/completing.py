"""`birl completion SHELL`: prints the completion script with the words of all commands, and where to install it."""

from collections.abc import Mapping, Sequence

from birl.cli.commands import ALL, CONFIGURED
from birl.cli.completion_scripts import Command, Vocabulary, bash, fish, zsh
from birl.cli.configured import flags_of
from birl.config.keys import SHORTHANDS, Doc, documentation, presets
from birl.config.schema import COMMANDS
from birl.envs.open import BUILT_IN
from birl.errors import BirlError
from birl.launch.launcher import WHERE

SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
NOTHING = ("int", "float")  # types of keys without known values
USAGE = """\
Usage: birl completion bash | zsh | fish

Prints a script that completes commands, keys, values and files with Tab. Generate it again after an update of
birl:

  bash   birl completion bash > ~/.local/share/bash-completion/completions/birl
         (make the folder first; or: echo 'source <(birl completion bash)' >> ~/.bashrc)
  zsh    birl completion zsh > ~/.zfunc/_birl
         (with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc)
  fish   birl completion fish > ~/.config/fish/completions/birl.fish"""


def run(words: Sequence[str]) -> int:
    """Print the script. Raises `BirlError`."""
    if len(words) != 1 or words[0] not in SHELLS:
        unknown = f"There is no completion for {' '.join(words)}. " if words else ""
        raise BirlError(f"{unknown}Name one shell, as in `birl completion bash`: {', '.join(SHELLS)}.")
    flags = {one.name: one.offered for one in ALL if one.offered} | {name: flags_of(name) for name in CONFIGURED}
    known = vocabulary({one.name: one.brief for one in ALL}, flags, ("single_turn", *BUILT_IN), tuple(WHERE))
    print(SHELLS[words[0]](known), end="")
    return 0


def vocabulary(
    texts: Mapping[str, str],
    flags: Mapping[str, tuple[str, ...]],
    environments: tuple[str, ...],
    places: tuple[str, ...],
) -> Vocabulary:
    """The vocabulary. `texts`: one line for each command; `flags`: words of each command."""
    result, docs = {}, {key: doc for schema in COMMANDS.values() for key, doc in documentation(schema).items()}
    free = tuple(sorted(key for key, doc in docs.items() if doc.type in NOTHING))
    for name, text in texts.items():
        schema = COMMANDS.get("rl" if name == "plan" else name)
        keys = _keys(schema) if schema else ()
        files = "any" if schema else "folders" if name not in ("doctor", "cache", "completion") else ""
        result[name] = Command(text=text, words=flags.get(name, ("--help",)), keys=keys, files=files)
    return Vocabulary(commands=result, values=_values(docs, environments), free=free, places=places)


def _keys(schema: type) -> tuple[str, ...]:
    known = documentation(schema)
    short = [name for name, key in SHORTHANDS.items() if key in known and name != "benchmark"]
    return tuple(sorted({*known, *presets(schema), *short}))


def _values(docs: Mapping[str, Doc], environments: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    known = {key: doc.choices or ("true", "false") for key, doc in docs.items() if doc.choices or doc.type == "bool"}
    for schema in COMMANDS.values():
        known |= {group: tuple(files) for group, files in presets(schema).items() if group != "model"}
    return known | dict.fromkeys(("env", "env.kind"), environments)
