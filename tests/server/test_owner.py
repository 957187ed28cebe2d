"""One server belongs to one run at a time."""

import pytest

from birl.engines.wire import header
from birl.server.limits import Refused
from birl.server.service import LIFE, Owner

A, B = header("host:/runs/first run"), header("host:/runs/b")


def test_the_first_run_keeps_others_out() -> None:
    now = [0.0]
    owner = Owner(clock=lambda: now[0])
    owner.admit("/info", A)
    assert owner.now() == "", "who only looks takes nothing"
    owner.admit("/claim", A)
    for path in ("/claim", "/load", "/stage/{version:int}", "/generate", "/pause", "/sleep"):
        owner.admit(path, A)
        with pytest.raises(Refused, match="host:/runs/first run"):
            owner.admit(path, B)
    for path in ("/load", "/join", "/leave"):
        with pytest.raises(Refused):
            owner.admit(path, {})  # somebody's curl
    owner.admit("/generate", {})  # who is no run may sample
    owner.admit("/v1/chat/completions", {})
    owner.admit("/info", B)
    owner.release(B)
    assert owner.now() == "host:/runs/first run"
    owner.release(A)
    owner.admit("/load", B)
    assert owner.now() == "host:/runs/b"


def test_what_a_run_asked_before_it_left_does_not_bring_it_back() -> None:
    owner = Owner()
    owner.admit("/claim", A)
    owner.release(A)
    owner.admit("/generate", A)  # was on its way on another connection
    owner.admit("/claim", B)
    with pytest.raises(Refused, match="runs/b"):
        owner.admit("/generate", A)
    owner.release(B)
    owner.admit("/claim", B)  # the same run goes on
    assert owner.now() == "host:/runs/b"


def test_a_run_that_is_silent_loses_it() -> None:
    now = [0.0]
    owner = Owner(clock=lambda: now[0])
    owner.admit("/load", A)
    now[0] = LIFE - 1
    owner.admit("/info", A)  # as a router does all the time
    now[0] = 2 * LIFE - 2
    with pytest.raises(Refused):
        owner.admit("/claim", B)
    now[0] = 2 * LIFE
    owner.admit("/claim", B)
    with pytest.raises(Refused, match="runs/b"):
        owner.admit("/generate", A)
