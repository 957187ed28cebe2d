"""A damaged ledger: a run goes on, and `birl ledger` names the line."""

import os
from pathlib import Path

import pytest

from birl.errors import BirlError
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
