"""Completion script for zsh."""

from birl.completion.bash import cases
from birl.completion.vocabulary import Vocabulary, filled
from birl.config.schema import TRAINING

SCRIPT = """\
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


def script(known: Vocabulary) -> str:
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
        "COMMANDS": "\n".join(f"      {_quoted(f'{name}:{c.text}')}" for name, c in known.commands.items()),
    }
    return filled(SCRIPT, parts)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
