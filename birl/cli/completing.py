"""`birl completion SHELL`: prints the completion script with the words of all commands, and where to install it."""

from collections.abc import Sequence

from birl.cli.commands import ALL, CONFIGURED
from birl.cli.configured import flags_of
from birl.completion import bash, fish, zsh
from birl.completion.vocabulary import vocabulary
from birl.envs.open import BUILT_IN
from birl.errors import BirlError
from birl.launch.launcher import WHERE

SHELLS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
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
