"""A damaged ledger: a run goes on, and `birl ledger` names the line."""

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from birl.errors import BirlError
from birl.rollout import ledger
from birl.rollout.ledger import FILE, Ledger, audit

WHOLE = (
    b'{"life":1,"event":"began","step":0}\n'
    b'{"life":1,"event":"sampled","group":0,"tokens":3}\n'
    b'{"life":1,"event":"settled","step":1,"group":0,"tokens":{"trained":3}}\n'
)


@pytest.mark.parametrize("tail", [os.urandom(3000), b'{"life":9,', b"7\n", b""])
def test_a_run_goes_on_behind_any_torn_tail(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / FILE).write_bytes(WHOLE + tail)
    Ledger(tmp_path, 1).close()
    assert (tmp_path / FILE).read_bytes() == WHOLE + b'{"life":2,"event":"began","step":1}\n'
    assert not audit(tmp_path).problems


def test_every_flipped_bit_is_named_or_changes_a_figure(tmp_path: Path) -> None:
    for place in range(len(WHOLE)):
        for bit in (1, 2, 4, 16, 32):
            damaged = bytearray(WHOLE)
            damaged[place] ^= bit
            (tmp_path / FILE).write_bytes(damaged)
            try:
                audit(tmp_path)
            except BirlError as error:
                assert f"{FILE}, line " in str(error)
            Ledger(tmp_path, 1).close()


def test_the_work_grows_with_the_rows_alone(tmp_path: Path) -> None:
    """Each row went through all lives: a file of 40 MB kept `birl ledger` busy for hours."""

    def lines(lives: int) -> int:
        rows = [{"life": i, "event": "began", "step": i} for i in range(1, lives + 1)]
        rows += [{"life": i, "event": "sampled", "group": i, "tokens": 1} for i in range(1, lives + 1)]
        settled = {"event": "settled", "tokens": {"trained": 1}}
        rows += [{"life": i, "step": i + i % 3, "group": i, **settled} for i in range(1, lives + 1)]
        (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += 1
            return trace if frame.f_code.co_filename == ledger.__file__ else None

        sys.settrace(trace)
        try:
            result = audit(tmp_path)
        finally:
            sys.settrace(None)
        assert not result.problems and result.tokens == {"redone": lives // 3, "trained": lives - lives // 3}
        return count

    assert lines(200) < 3 * lines(100)
