"""The command line: `birl COMMAND [key=value ...]`. Everything heavy is imported by the command that needs it.

Exit codes: 0 done; 1 a job of --multirun failed, `birl doctor` reports something
missing, `birl eval --validate` a wrong row, `birl reproduce` a figure outside its band, `birl status` a process that
failed, `birl ledger` one that does not close, or `verify` of checkpoints and cache damage; 2 a mistake in the input; 3
the watchdog ended a run in which nothing went on; 130 after Ctrl-C and 143 after SIGTERM, also where a training has
saved before.
"""

import errno
import os
import select
import signal
import sys
import threading
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import Any

from birl import __version__
from birl.allocator import keep_memory
from birl.cli.commands import BY_NAME, CONFIGURED, USAGE, instead, page
from birl.errors import (
    INTERRUPTED,
    MISTAKE,
    BirlError,
    Terminated,
    code_of,
    current_folder,
    did_you_mean,
    tell,
    tell_traceback,
    terminable,
    terminate,
)

COMMANDS = tuple(BY_NAME)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of writes that do not name the file


def load(name: str) -> Any:
    """Import a module. A signal meanwhile is raised as such, and a torchvision that does not fit as `BirlError`:
    transformers turns both exceptions into a ModuleNotFoundError."""
    raised: list[type[KeyboardInterrupt]] = []

    def signalled(number: int, frame: FrameType | None) -> None:
        raised.append(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
        raise raised[-1]

    main = threading.current_thread() is threading.main_thread()
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    ours = {number: handler for number, handler in usual.items() if main and signal.getsignal(number) is handler}
    for number in ours:
        signal.signal(number, signalled)
    try:
        return import_module(name)
    except Exception as error:
        if raised:
            raise raised[-1] from error
        cause: BaseException | None = error
        while cause is not None and "operator torchvision::" not in str(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise BirlError(
                f"torchvision is not the build for this PyTorch ({cause}): install both from one place, as in "
                "pip install torch torchvision --index-url URL, or remove it: pip uninstall torchvision"
            ) from error
        raise
    finally:
        for number, handler in ours.items():  # asyncio compares SIGINT's handler with this one
            signal.signal(number, handler)


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code. A `BirlError` becomes a message, never a traceback."""
    keep_memory()
    sys.excepthook = tell_traceback
    if isinstance(sys.stdout, TextIOWrapper):  # replace characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    words = sys.argv[1:] if argv is None else argv
    try:
        with terminable():
            return _dispatch(words)
    except BirlError as error:
        tell(error)
        return MISTAKE
    except KeyboardInterrupt as interrupt:
        code = code_of(interrupt)
        print("birl: interrupted" if code == INTERRUPTED else "birl: terminated", file=sys.stderr)
        return code
    except BrokenPipeError:
        if not _nobody_reads():  # another pipe, such as to a worker
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at exit
        return 0
    except OSError as error:  # damage, a full disk, missing rights: file and reason are enough
        if error.filename is None:
            if error.errno == errno.ENOENT:
                try:
                    current_folder()
                except BirlError as gone:
                    tell(gone)
                    return MISTAKE
            if error.errno not in FULL:
                raise
            tell(BirlError(f"{error.strerror}: make room on the disk, then start the same command again."))
            return MISTAKE
        name = str(error.filename)
        key, why = "", str(error.strerror or error)
        if error.errno == errno.ENAMETOOLONG:
            key, why = _key_of(name, words), "this name is too long for a file; give a shorter one"
        tell(BirlError(f"{key}{name if len(name) < 200 else f'{name[:80]}...'}: {why}."))
        return MISTAKE


def _key_of(name: str, words: list[str]) -> str:
    """`KEY=` of the word that contains a name, or its longest part; `FILE, line N: ` if a YAML file contains it."""
    part = max(name.split("/"), key=len)
    pairs = [word.partition("=")[::2] for word in words]
    long = [(f"{key}=", value.rstrip("/")) for key, value in pairs if len(value) > 200]
    for word in words:
        if word.endswith((".yaml", ".yml")) and os.path.isfile(word):
            with open(word, encoding="utf-8", errors="replace") as file:
                lines = enumerate((line.strip().rstrip("'\"]/") for line in file), start=1)
                long += [(f"{word}, line {n}: ", line) for n, line in lines if len(line) > 200]
    return next((where for where, text in long if text in name or (len(part) > 200 and part in text)), "")


def _nobody_reads() -> bool:
    """Whether the reader of our output has closed the pipe, as in `birl rl --help | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are reported without a request
    return bool(output.poll(0))


def _dispatch(argv: list[str]) -> int:
    name, *words = argv or ["--help"]
    if name in ("--help", "-h", "help"):
        if words and name == "help":
            return _dispatch([*words, "--help"])
        print(page(), end="")
        return 0
    if "--version" in (name, *words[:1]):
        print(f"birl {__version__}")
        return 0
    if name in CONFIGURED:
        from birl.cli import configured

        return configured.run(name, words)
    if name not in BY_NAME:
        raise BirlError(_unknown(name))
    command = BY_NAME[name]
    if ("--help" in words or "-h" in words) and name != "launch":  # which has help for each place
        print(USAGE.get(name) or import_module(command.run.partition(":")[0]).USAGE)
        return 0
    module, _, function = command.run.partition(":")
    return getattr(load(module), function)(words)


def _unknown(name: str) -> str:
    what = "a command comes first, as in `birl rl key=value`" if "=" in name else f"there is no command {name}"
    close = instead(name)
    hint = f" Did you mean `birl {close}`?" if close else did_you_mean(name, (*COMMANDS, "--version", "--help"))
    return f"{what}; the commands are {', '.join(COMMANDS)}.{hint}"
