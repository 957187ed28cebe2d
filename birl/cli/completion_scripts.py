"""Completion scripts: for bash 3.2 (macOS) or newer, zsh and fish."""

from collections.abc import Mapping
from dataclasses import dataclass

from birl.config.schema import TRAINING

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
class Command:
    """Completions of one command. `words` are literal, keys become `key=`. `files`: any, folders, or none (empty)."""

    text: str
    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    files: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`values`: of keys with a fixed choice. `free`: keys with numbers, which have no completions; all others take
    files. `places`: words after `birl launch`."""

    commands: Mapping[str, Command]
    values: Mapping[str, tuple[str, ...]]
    free: tuple[str, ...]
    places: tuple[str, ...]


def filled(script: str, parts: Mapping[str, str]) -> str:
    """A shell script with each @NAME@ replaced."""
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script


def same_answers(cases: Mapping[str, str]) -> dict[str, list[str]]:
    """answer -> the keys that have it, which share a line of the script."""
    keys: dict[str, list[str]] = {}
    for key, answer in cases.items():
        keys.setdefault(answer, []).append(key)
    return keys


def bash(known: Vocabulary) -> str:
    takes = {
        name: f"echo '{c.files}'; echo '{' '.join(c.words)}'; echo '{' '.join(c.keys)}'"
        for name, c in known.commands.items()
    }
    values = {**{key: "\\n".join(choices) for key, choices in known.values.items()}, **dict.fromkeys(known.free, "")}
    parts = {
        "TAKES": cases(takes),
        "VALUES": cases({key: f"printf '{text}'" for key, text in values.items()}),
        "PLACES": "\n".join(known.places),
        "TRAINED": "\n".join(TRAINING),
        "COMMANDS": "\n".join(known.commands),
    }
    return filled(BASH, parts)


def cases(answers: Mapping[str, str]) -> str:
    """Cases of a `case` statement, for bash and zsh."""
    return "\n".join(f"  {'|'.join(keys)}) {answer} ;;" for answer, keys in same_answers(answers).items())


def zsh(known: Vocabulary) -> str:
    takes = {
        name: f"files='{c.files}' plain=({' '.join(c.words)}) keys=({' '.join(f'{key}=' for key in c.keys)})"
        for name, c in known.commands.items()
    }
    values = {**{key: " ".join(choices) for key, choices in known.values.items()}, **dict.fromkeys(known.free, "")}
    parts = {
        "TAKES": cases(takes),
        "VALUES": cases({key: f"values=({text})" for key, text in values.items()}),
        "PLACES": " ".join(known.places),
        "TRAINED": " ".join(TRAINING),
        "COMMANDS": "\n".join(f"      {_zsh_quoted(f'{name}:{c.text}')}" for name, c in known.commands.items()),
    }
    return filled(ZSH, parts)


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish(known: Vocabulary) -> str:
    values = {key: " ".join(choices) for key, choices in known.values.items()}
    takes = {name: _fish_takes(c.words, c.keys, c.files) for name, c in known.commands.items()}
    nothing = dict.fromkeys(known.free, "true")
    parts = {
        "TAKES": _fish_cases(takes, 8),
        "VALUES": _fish_cases({key: f'printf "$key=%s\\n" {text}' for key, text in values.items()} | nothing, 12),
        "PLACES": " ".join(known.places),
        "TRAINED": " ".join(TRAINING),
        "COMMANDS": " ".join(f"{name} {_fish_quoted(c.text)}" for name, c in known.commands.items()),
    }
    return filled(FISH, parts)


def _fish_takes(words: tuple[str, ...], keys: tuple[str, ...], files: str) -> str:
    lines = [f"printf '%s\\n' {' '.join([*words, *(f'{key}=' for key in keys)])}"]
    lines += ["__fish_complete_path $word"] if files == "any" else []
    lines += ["__fish_complete_directories $word ''"] if files == "folders" else []
    return "\n".join(lines)


def _fish_cases(cases: Mapping[str, str], indent: int) -> str:
    lines = []
    for answer, same in same_answers(cases).items():
        lines += [f"case {' '.join(same)}", *(f"    {line}" for line in answer.splitlines())]
    return "\n".join(" " * indent + line for line in lines)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
