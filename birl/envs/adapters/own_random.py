"""Games that draw from Python's and NumPy's global generators, each with a state of its own.

Such games seed the generators of the whole process, and episodes that are played at once draw from each other's. Inside
`with own_random:` the global generators have this game's state; afterwards, the one they had before.
"""

import random
import threading
from types import TracebackType

import numpy as np

WAIT = 60.0  # seconds until another game must have made its move

_lock = threading.Lock()


class OwnRandom:
    """The state of one game. Held for one call into the game at a time, never for an episode: a game that is left
    alone in the middle delays no other.

    Example: with OwnRandom(7): env.reset()
    """

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.RandomState(seed % 2**32).get_state()

    def __enter__(self) -> None:
        if not _lock.acquire(timeout=WAIT):
            raise RuntimeError(f"another game has not finished its move for {WAIT:g} s")
        self.before = random.getstate(), np.random.get_state()
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()
        random.setstate(self.before[0])
        np.random.set_state(self.before[1])
        _lock.release()
