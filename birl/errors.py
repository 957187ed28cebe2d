"""The exceptions that cross layers, and their messages."""

import difflib
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType

from birl.visible import visible


class BirlError(Exception):
    """A problem with the input, the configuration or the machine, in words that name the place and the fix: the command
    line prints it without a traceback and exits 2."""


class WeightsFailed(BirlError):
    """New weights did not arrive at an engine, which then holds what it held before. `cause` is one of: stale (another
    version than asked for), missing (a tensor, or an adapter, is not there), truncated, mismatch (other bytes), numbers
    (NaN, infinity, or the engine computes other log-probs with them), unreachable."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineDown(Exception):
    """An engine in another process does not answer, or not as it should: try another one. `retry_after` above 0: it is
    well, and full for about so many seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Malformed(EngineDown):
    """What it answers is no answer."""


class EngineFailed(Exception):
    """Ends an episode: wraps what an engine raised, to tell it from what an environment raised."""


class Aborted(Exception):
    """Ends an episode: the engine ended the answer on request."""


class HistoryRewritten(BirlError):
    """The chat template renders earlier messages in another way once new ones come, so the conversation cannot go on
    token by token."""


class TooLong(Exception):
    """No room is left for an answer of the model, or no turn: the episode is cut."""


def tell(error: BirlError) -> None:
    """On stderr, each line marked as ours. What a program or a model wrote may be in it: nothing that a terminal would
    obey is printed."""
    for line in visible(str(error)).splitlines():
        print(f"birl: {line}", file=sys.stderr)


def tell_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python prints of an exception that ends the program, without what a terminal would obey."""
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def text_of(error: BaseException) -> str:
    """What an error says; nothing where that raises, as an exception of foreign code may."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line(error: BaseException) -> str:
    """Of what an error says, with the next one where it ends in a colon; its type where it says nothing."""
    first, *more = (text_of(error).strip() or type(error).__name__).splitlines()
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


def did_you_mean(word: str, options: Iterable[str], prefix: str = "") -> str:
    """` Did you mean grpo?`, or nothing where no option is close. `prefix`: a section, such as `env.`, that the answer
    shows and the comparison leaves out."""
    result = difflib.get_close_matches(word.lower(), list(options), n=1, cutoff=0.6)
    return f" Did you mean {prefix}{result[0]}?" if result else ""


def innermost(error: BaseException) -> BaseException:
    """The error itself, without the task groups around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
