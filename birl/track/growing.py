"""A file of lines that another process writes."""

from collections.abc import Iterator
from pathlib import Path

from birl.regular import NotRegular, open_regular

BLOCK = 1 << 23  # bytes read at a time
REMEMBERED = 256  # bytes before the place where reading stopped, to notice another file in its place


class Growing:
    """Whole lines, each once, on from where the last look ended; a half-written last line waits for its rest.

    Example: file = Growing(Path("runs/demo/metrics.jsonl")); [line for lines in file.new() for line in lines]
    """

    def __init__(self, path: Path) -> None:
        self.path, self.taken = path, 0  # bytes
        self._before = b""

    @property
    def unread(self) -> int:
        """Bytes that are there and were not taken yet."""
        try:
            return max(0, self.path.stat().st_size - self.taken)
        except OSError:
            return 0

    @property
    def goes_on(self) -> bool:
        """Whether what was taken is still there. A resume cuts files back, and they may have grown again since."""
        if not self.taken:
            return True
        try:
            with open_regular(self.path) as file:
                file.seek(self.taken - len(self._before))
                return file.read(len(self._before)) == self._before
        except OSError:
            return False

    def new(self) -> Iterator[list[bytes]]:
        """The lines that were added, without their ends, in blocks. A file that is not there has none."""
        try:
            file = open_regular(self.path)
        except (FileNotFoundError, NotRegular):
            return
        with file:
            file.seek(self.taken)
            rest = b""
            while block := file.read(BLOCK):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if newline:
                    self.taken += len(whole) + 1
                    self._before = (self._before + whole[-REMEMBERED:] + newline)[-REMEMBERED:]
                    yield whole.split(b"\n")
