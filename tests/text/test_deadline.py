"""Time bounds of code that cannot be asked to stop."""

import sys
import threading

import pytest

from birl.foreign import Overdue, deadline


def test_endless_code_is_interrupted_also_without_hooks_for_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", None)  # an agent's doing; no thread would start
    monkeypatch.setattr(threading, "excepthook", None)
    with pytest.raises(Overdue), deadline(0.1):
        while True:
            pass
