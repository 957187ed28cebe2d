"""Completion script for bash, 3.2 (macOS) or newer."""

from collections.abc import Mapping

from birl.completion.vocabulary import Vocabulary, filled, same_answers
from birl.config.schema import TRAINING

SCRIPT = """\
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


def script(known: Vocabulary) -> str:
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
    return filled(SCRIPT, parts)


def cases(answers: Mapping[str, str]) -> str:
    """Cases of a `case` statement, for bash and zsh."""
    return "\n".join(f"  {'|'.join(keys)}) {answer} ;;" for answer, keys in same_answers(answers).items())
