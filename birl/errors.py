"""Exceptions that layers share and their messages, exit codes of commands, and SIGTERM as an exception."""

import difflib
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from birl.visible import visible

#: what users may import
__all__ = ["Aborted", "BirlError", "EngineDown", "EngineFailed", "HistoryRewritten", "Malformed", "TooLong"]
__all__ += ["Terminated", "WeightsFailed"]

LARGE = os.strerror(errno.EFBIG)  # no disk is full then


class BirlError(Exception):
    """A problem with the input, the configuration or the machine. The message names the place and the fix: the command
    line prints it without a traceback and exits with 2."""


class WeightsFailed(BirlError):
    """A weight update failed; the engine keeps its previous weights. `cause` is one of: stale (another version than
    requested), missing (a tensor or an adapter), truncated, mismatch (other bytes), numbers (NaN, infinity, or the
    engine computes other log-probs with them), unreachable."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineDown(Exception):
    """An engine in another process does not answer, or not correctly: try another one. `retry_after` above 0: it works,
    but is full for about so many seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Malformed(EngineDown):
    """The engine's response is not valid."""


class EngineFailed(Exception):
    """Ends an episode: wraps an exception of the engine, to distinguish it from one of the environment."""


class Aborted(Exception):
    """Ends an episode: the request was aborted."""


class HistoryRewritten(BirlError):
    """The chat template renders earlier messages differently after new ones are added, so the conversation cannot be
    continued token by token."""


class TooLong(Exception):
    """No tokens or turns are left for an answer of the model: the episode is truncated."""


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Context in which a `BirlError` begins with `where`, a file and its row, for example, unless it names that."""
    try:
        yield
    except BirlError as error:
        if where in str(error):
            raise
        raise BirlError(f"{where}: {error}") from error


def tell(error: BirlError) -> None:
    """Print it on stderr, each line with the prefix `birl:`. It may contain output of a program or a model, so control
    characters are escaped."""
    limited = "\n`ulimit -f` shows the limit of a file's size; raise it." if LARGE in str(error) else ""
    for line in visible(f"{error}{limited}").splitlines():
        print(f"birl: {line}", file=sys.stderr)


def tell_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback as Python does for an uncaught exception, with control characters escaped."""
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def text_of(error: BaseException) -> str:
    """The error's message; empty if `str` raises, as an exception of user code may."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line(error: BaseException) -> str:
    """First line of the error's message, with the next one if it ends in a colon; the error's type if it is empty."""
    first, *more = (text_of(error).strip() or type(error).__name__).splitlines()
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


def did_you_mean(word: str, options: Iterable[str], prefix: str = "") -> str:
    """` Did you mean grpo?`, or an empty text if no option is close. `prefix`: a section, such as `env.`, that is shown
    in the answer but not compared."""
    word, options = word.lower(), list(options)
    result = [one for one in options if sorted(one) == sorted(word)] + difflib.get_close_matches(word, options, n=1)
    result += [one for one in options if len(word) > 2 and one.startswith(word)]  # guess: guess_number
    return f" Did you mean {prefix}{result[0]}?" if result else ""


def no_file(place: str) -> str:
    """`there is no file mine.pi in /home/me. Did you mean mine.py?`"""
    beside = [str(path) for path in Path(place).parent.glob(f"*{Path(place).suffix[:2]}*")]
    return f"there is no file {place} in {current_folder()}.{did_you_mean(place, beside)}"


def current_folder() -> str:
    """The current folder. Raises `BirlError` if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise BirlError("the current folder was deleted: change to another one, as with `cd`.") from None


def innermost(error: BaseException) -> BaseException:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


MISTAKE = 2  # wrong input, or a run that had to stop
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
STOPPED = (INTERRUPTED, TERMINATED)  # training has saved a checkpoint


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception; code that cleans up after Ctrl-C also cleans up after it."""


def terminate(number: int, frame: FrameType | None) -> None:
    """Handler of SIGTERM. A second signal ends the process, even if the first was caught as an error."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def code_of(interrupt: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """In this context SIGTERM raises `Terminated`, unless it is handled or ignored already. Main thread only."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
