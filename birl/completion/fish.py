"""Completion script for fish."""

from collections.abc import Mapping

from birl.completion.vocabulary import Vocabulary, filled, same_answers
from birl.config.schema import TRAINING

SCRIPT = """\
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


def script(known: Vocabulary) -> str:
    values = {key: " ".join(choices) for key, choices in known.values.items()}
    takes = {name: _takes(c.words, c.keys, c.files) for name, c in known.commands.items()}
    nothing = dict.fromkeys(known.free, "true")
    parts = {
        "TAKES": _cases(takes, 8),
        "VALUES": _cases({key: f'printf "$key=%s\\n" {text}' for key, text in values.items()} | nothing, 12),
        "PLACES": " ".join(known.places),
        "TRAINED": " ".join(TRAINING),
        "COMMANDS": " ".join(f"{name} {_quoted(c.text)}" for name, c in known.commands.items()),
    }
    return filled(SCRIPT, parts)


def _takes(words: tuple[str, ...], keys: tuple[str, ...], files: str) -> str:
    lines = [f"printf '%s\\n' {' '.join([*words, *(f'{key}=' for key in keys)])}"]
    lines += ["__fish_complete_path $word"] if files == "any" else []
    lines += ["__fish_complete_directories $word ''"] if files == "folders" else []
    return "\n".join(lines)


def _cases(cases: Mapping[str, str], indent: int) -> str:
    lines = []
    for answer, same in same_answers(cases).items():
        lines += [f"case {' '.join(same)}", *(f"    {line}" for line in answer.splitlines())]
    return "\n".join(" " * indent + line for line in lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
