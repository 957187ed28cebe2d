"""`birl completion SHELL`: prints the completion script with the words of all commands, and where to install it: for
bash 3.2 (macOS) or newer, zsh and fish."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from birl.cli.commands import ALL, CONFIGURED
from birl.cli.commands import USAGE as HELP
from birl.cli.configured import flags_of
from birl.config.keys import SHORTHANDS, documentation, presets
from birl.config.schema import COMMANDS, TRAINING
from birl.envs.open import BUILT_IN
from birl.errors import BirlError
from birl.launch.launcher import WHERE
from birl.recipes.recipe import OWN, names

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
BASH = """\
# Completion of birl for bash, made by `birl completion bash`.
_birl_takes() {
  case "$1" in
@TAKES@
  esac
}
_birl_values() {
  case "$1" in
@VALUES@
  *) return 1 ;;
  esac
}
_birl_files() {  # $1: what is there already, $2: any or folders
  local path kind=-f
  [[ $2 == folders ]] && kind=-d
  while IFS= read -r path; do
    [[ -d $path ]] && printf '%s/\\n' "$path" || printf '%s \\n' "$path"
  done < <(compgen $kind -- "$1")
}
_birl() {
  # "=" and ":" split COMP_WORDS, so the word is taken from the line; the answer is what follows the last of them.
  local IFS=$'\\n' line=${COMP_LINE:0:COMP_POINT} choices
  local word=${line##*[[:space:]]}
  local -a before
  IFS=$' \\t' read -r -a before <<< "${line%"$word"}"
  local command=${before[1]} place=${#before[@]}
  if [[ $command == launch ]]; then
    if (( place == 2 )); then COMPREPLY=($(compgen -W "@PLACES@" -S ' ' -- "$word")); return; fi
    if (( place == 3 )); then COMPREPLY=($(compgen -W "@TRAINED@" -S ' ' -- "$word")); return; fi
    command=${before[3]}
  fi
  if (( place < 2 )); then
    COMPREPLY=($(compgen -W "@COMMANDS@" -S ' ' -- "$word"))
  elif [[ $word == *=* ]]; then
    local key=${word%%=*} value=${word#*=}
    if choices=$(_birl_values "$key"); then
      COMPREPLY=($(compgen -W "$choices" -S ' ' -- "$value"))
    else
      COMPREPLY=($(_birl_files "$value" any))
    fi
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$key=}")
  else
    local words keys files
    { read -r files; read -r words; read -r keys; } < <(_birl_takes "$command")
    IFS=' '
    choices=$(compgen -W "$words" -S ' ' -- "$word"; compgen -W "$keys" -S '=' -- "$word")
    IFS=$'\\n'
    COMPREPLY=($choices)
    [[ -n $files ]] && COMPREPLY+=($(_birl_files "$word" "$files"))
  fi
}
complete -o nospace -F _birl birl
"""
ZSH = """\
#compdef birl
# Completion of birl for zsh, made by `birl completion zsh`.
_birl() {
  local command=$words[2] files key
  local -a plain keys values
  if [[ $command == launch ]]; then
    (( CURRENT == 3 )) && { compadd -- @PLACES@; return }
    (( CURRENT == 4 )) && { compadd -- @TRAINED@; return }
    (( CURRENT > 4 )) && command=$words[4]
  fi
  if (( CURRENT == 2 )); then
    local -a commands=(
@COMMANDS@
    )
    _describe command commands
    return
  fi
  if [[ $PREFIX == *=* ]]; then
    key=${PREFIX%%=*}
    compset -P '*='
    case $key in
@VALUES@
    *) _files; return ;;
    esac
    compadd -- $values
    return
  fi
  case $command in
@TAKES@
  esac
  compadd -- $plain
  compadd -S '' -- $keys
  [[ $files == any ]] && _files
  [[ $files == folders ]] && _files -/
}
if [[ $funcstack[1] == _birl ]]; then _birl "$@"; else compdef _birl birl; fi
"""
FISH = """\
# Completion of birl for fish, made by `birl completion fish`.
function __birl_complete
    set -l before (commandline -opc)
    set -l word (commandline -ct)
    set -l command $before[2]
    set -l place (count $before)
    if test "$command" = launch
        test $place -eq 2; and printf '%s\\n' @PLACES@; and return
        test $place -eq 3; and printf '%s\\n' @TRAINED@; and return
        set command $before[4]
    end
    if test $place -lt 2
        printf '%s\\t%s\\n' @COMMANDS@
        return
    end
    if string match -q '*=*' -- $word
        set -l key (string split -m 1 = -- $word)[1]
        switch $key
@VALUES@
            case '*'
                for path in (__fish_complete_path (string split -m 1 = -- $word)[2])
                    echo $key=$path
                end
        end
        return
    end
    switch $command
@TAKES@
    end
end
complete -c birl -f -a '(__birl_complete)'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Of one command. `words` are literal, keys become `key=`. `files`: any, folders, or none (empty)."""

    brief: str
    words: tuple[str, ...]
    keys: tuple[str, ...]
    files: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`values`: of keys with a fixed choice. `free`: keys with numbers, which have no completions; all others take
    files."""

    commands: Mapping[str, Completions]
    values: Mapping[str, Sequence[str]]
    free: Sequence[str]


def run(words: Sequence[str]) -> int:
    """Print the script. Raises `BirlError`."""
    if len(words) != 1 or words[0] not in SHELLS:
        unknown = f"There is no completion for {' '.join(words)}. " if words else ""
        raise BirlError(f"{unknown}Name one shell, as in `birl completion bash`: {', '.join(SHELLS)}.")
    print(SHELLS[words[0]](vocabulary()), end="")
    return 0


def vocabulary() -> Vocabulary:
    docs = {key: doc for schema in COMMANDS.values() for key, doc in documentation(schema).items()}
    values = {key: doc.choices or ("true", "false") for key, doc in docs.items() if doc.choices or doc.type == "bool"}
    for schema in COMMANDS.values():
        values |= {group: tuple(files) for group, files in presets(schema).items() if group != "model"}
    values |= dict.fromkeys(("env", "env.kind"), ("single_turn", *BUILT_IN))
    commands, recipes = {}, (*names(),) if (OWN / "recipes").is_dir() else ()
    for one in ALL:
        schema, keys = COMMANDS.get("rl" if one.name == "plan" else one.name), set[str]()
        if schema:
            known = documentation(schema)
            short = [name for name, key in SHORTHANDS.items() if key in known and name != "benchmark"]
            keys = {*known, *presets(schema), *short}
        told = re.findall("--[a-z][a-z-]+", HELP.get(one.name, ""))
        flags = flags_of(one.name) if one.name in CONFIGURED else told
        shelf = recipes if one.name == "reproduce" else ()
        words = tuple(dict.fromkeys((*one.offered, *shelf, *flags, "--help")))
        files = "any" if schema else "folders" if one.name not in ("doctor", "cache", "completion") else ""
        commands[one.name] = Completions(brief=one.brief, words=words, keys=tuple(sorted(keys)), files=files)
    free = sorted(key for key, doc in docs.items() if doc.type in NOTHING)
    return Vocabulary(commands=commands, values=values, free=free)


def filled(script: str, between: str, **parts: str) -> str:
    """A shell script with each @NAME@ replaced. `between`: separates words of a list in this shell."""
    lists = {"PLACES": between.join(WHERE), "TRAINED": between.join(TRAINING)}
    for name, text in (parts | lists).items():
        script = script.replace(f"@{name}@", text)
    return script


def same_answers(cases: Mapping[str, str]) -> dict[str, list[str]]:
    """answer -> the keys that have it, which share a line of the script."""
    keys: dict[str, list[str]] = {}
    for key, answer in cases.items():
        keys.setdefault(answer, []).append(key)
    return keys


def cases(answers: Mapping[str, str]) -> str:
    """Cases of a `case` statement, for bash and zsh."""
    return "\n".join(f"  {'|'.join(keys)}) {answer} ;;" for answer, keys in same_answers(answers).items())


def bash(known: Vocabulary) -> str:
    takes = {
        name: f"echo '{c.files}'; echo '{' '.join(c.words)}'; echo '{' '.join(c.keys)}'"
        for name, c in known.commands.items()
    }
    values = {key: "\\n".join(choices) for key, choices in known.values.items()} | dict.fromkeys(known.free, "")
    printed = cases({key: f"printf '{text}'" for key, text in values.items()})
    return filled(BASH, "\n", TAKES=cases(takes), VALUES=printed, COMMANDS="\n".join(known.commands))


def zsh(known: Vocabulary) -> str:
    takes = {
        name: f"files='{c.files}' plain=({' '.join(c.words)}) keys=({' '.join(f'{key}=' for key in c.keys)})"
        for name, c in known.commands.items()
    }
    values = {key: " ".join(choices) for key, choices in known.values.items()} | dict.fromkeys(known.free, "")
    texts = [f"{name}:{c.brief}".replace("'", "'\\''") for name, c in known.commands.items()]
    return filled(
        ZSH,
        " ",
        TAKES=cases(takes),
        VALUES=cases({key: f"values=({text})" for key, text in values.items()}),
        COMMANDS="\n".join(f"      '{text}'" for text in texts),
    )


def fish(known: Vocabulary) -> str:
    takes = {}
    for name, c in known.commands.items():
        lines = [f"printf '%s\\n' {' '.join([*c.words, *(f'{key}=' for key in c.keys)])}"]
        lines += ["__fish_complete_path $word"] if c.files == "any" else []
        lines += ["__fish_complete_directories $word ''"] if c.files == "folders" else []
        takes[name] = "\n".join(lines)
    values = {key: f'printf "$key=%s\\n" {" ".join(choices)}' for key, choices in known.values.items()}
    texts = {name: c.brief.replace("\\", "\\\\").replace("'", "\\'") for name, c in known.commands.items()}
    return filled(
        FISH,
        " ",
        TAKES=_fish_cases(takes, 8),
        VALUES=_fish_cases(values | dict.fromkeys(known.free, "true"), 12),
        COMMANDS=" ".join(f"{name} '{text}'" for name, text in texts.items()),
    )


def _fish_cases(cases: Mapping[str, str], indent: int) -> str:
    lines = []
    for answer, same in same_answers(cases).items():
        lines += [f"case {' '.join(same)}", *(f"    {line}" for line in answer.splitlines())]
    return "\n".join(" " * indent + line for line in lines)


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
