"""A copy of the package without some of its files, in which the demo's loop runs: a program of `test_parts.py`.

python without.py COPY JOBS: `JOBS` is JSON, a list of [files, commands]; the files are away while the commands run, in
a process that is forked from one that has imported the libraries, and nothing of birl. Prints the result as JSON: for
each job a list of [exit code, what was printed].
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import datasets  # noqa: F401
import torch  # noqa: F401
import transformers
import transformers.models.llama.modeling_llama  # noqa: F401


def commands(words: list[list[str]]) -> list[tuple[int, str]]:
    from birl.cli import main

    done = []
    for command in words:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            code = main(command)
        done.append((code, out.getvalue()))
    return done


def apart(words: list[list[str]], file: Path) -> list[tuple[int, str]]:
    """`commands` in a child of this process."""
    if (pid := os.fork()) == 0:
        try:
            file.write_text(json.dumps(commands(words)))
        except BaseException as error:
            file.write_text(json.dumps([(-1, f"{type(error).__name__}: {error}")]))
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(file.read_text())


if __name__ == "__main__":
    copy = Path(sys.argv[1])
    sys.path.insert(0, str(copy))
    assert "birl" not in sys.modules
    results = []
    for files, words in json.loads(sys.argv[2]):
        away = [(copy / name, copy / f"{name}.away") for name in files]
        for path, gone in away:
            path.rename(gone)
        results.append(apart(words, copy / "result.json"))
        for path, gone in away:
            gone.rename(path)
    print(json.dumps(results))
