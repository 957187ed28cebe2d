"""A run's files as Python has them: `Trainer.metrics`, `Trainer.rollouts`."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

from birl.errors import BirlError, did_you_mean
from birl.regular import open_regular
from birl.track.log import parsed


class Records(Sequence[dict[str, Any]]):
    """The lines of a JSON Lines file as dicts, read when they are asked for: a run may be going on. A torn last line is
    left out.

    Example: Records(run / "metrics.jsonl")[-1]["reward/mean"]; Records(run / "rollouts.jsonl").to_pandas()
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One line after the other: a file of rollouts may be larger than the memory. Raises `BirlError` where there is
        no file yet, or a line is damaged."""
        if not self.path.is_file():
            raise BirlError(f"{self.path} does not exist (yet): call train() first.")
        with open_regular(self.path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield parsed(self.path, number, line)

    def __len__(self) -> int:
        return sum(1 for _ in self) if self.path.is_file() else 0

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, int) and index >= 0:
            for record in islice(self, index, index + 1):
                return record
            raise IndexError(f"{self.path.name} has no line {index}")
        return list(self)[index]

    def column(self, name: str) -> list[Any]:
        """One value of each line, None where a line has none. Raises `BirlError` where no line has it."""
        records = list(self)
        if records and not any(name in record for record in records):
            known = sorted({key for record in records for key in record})
            raise BirlError(f"{self.path.name} has no {name!r}.{did_you_mean(name, known)}")
        return [record.get(name) for record in records]

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each line. Half an emoji, which is no text for pandas, is spelled out. Raises
        `BirlError` where pandas is missing."""
        try:
            import pandas
        except ImportError as error:
            raise BirlError('to_pandas() needs a package: pip install "birl[notebook]"') from error
        return pandas.DataFrame([{key: _encodable(value) for key, value in record.items()} for record in self])

    def __repr__(self) -> str:
        return f"<{len(self):,} records of {self.path}>"


def _encodable(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
