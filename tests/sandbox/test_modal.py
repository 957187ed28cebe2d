"""The adapter of Modal, against a stand-in with the client's signatures: what it asks for, and what comes back."""

import asyncio
import os
import sys
from typing import Any

import pytest

from birl.errors import BirlError
from birl.sandbox.code import cases, run_tests
from birl.sandbox.open import open_sandbox
from birl.sandbox.protocol import Ending, Limits, Result, Sandbox
from tests.sandbox import modal_api


@pytest.fixture
def modal(monkeypatch: pytest.MonkeyPatch) -> modal_api.Modal:
    found = modal_api.Modal()
    monkeypatch.setitem(sys.modules, "modal", found)
    if os.geteuid():  # the container's root becomes nobody; an ordinary user cannot
        monkeypatch.setattr("birl.sandbox.modal.NOBODY", "0")
    return found


def run(program: str, limits: Limits, **options: Any) -> Result:
    async def go() -> Result:
        sandbox = await open_sandbox("modal", workers=2)
        return await sandbox.run({"main.py": program}, ["python", "main.py"], limits, **options)

    return asyncio.run(go())


def test_a_program_runs_in_a_container_of_its_own(modal: modal_api.Modal) -> None:
    program = "import sys\nopen('out', 'w').write('8')\nprint(input(), file=sys.stderr)\nprint(7)\nsys.exit(3)"
    result = run(program, Limits(seconds=9, memory_mb=300), stdin="in\n", collect=["out"])
    assert (result.stdout, result.stderr, result.exit_code) == (b"7\n", b"in\n", 3)
    assert (result.ending, result.kind, result.warning) == (Ending.OK, "modal", "")
    assert result.files == {"out": b"8"} and modal.living == 0
    (_, asked) = modal.calls[-1]
    assert asked == {"app": "app", "image": "image", "timeout": 69, "memory": (300, 556), "block_network": True}


def test_its_limits_hold(modal: modal_api.Modal) -> None:
    result = run("import time\ntime.sleep(99)", Limits(seconds=0.3))
    assert result.ending is Ending.TIMEOUT and modal.living == 0
    assert run("print('x' * 9999)", Limits(output_bytes=100)).ending is Ending.OUTPUT


def test_a_container_that_does_not_come_is_an_error_of_the_sandbox(modal: modal_api.Modal) -> None:
    modal.broken = modal_api.Error("no credit")
    result = run("print(7)", Limits())
    assert (result.ending, "no credit" in result.detail) == (Ending.ERROR, True)


def test_a_guest_that_fails_is_an_error_of_the_sandbox_and_no_wrong_program(modal: modal_api.Modal) -> None:
    async def go(files: dict[str, str], program: list[str]) -> Result:
        return await (await open_sandbox("modal")).run(files, program, Limits())

    failed = asyncio.run(go({"a": "", "a/b": ""}, ["true"]))  # a file and a folder of one name
    assert (failed.ending, "exit code 1" in failed.detail) == (Ending.ERROR, True)
    with pytest.raises(BirlError, match="command is empty"):
        asyncio.run(go({}, []))


def test_unit_tests_run_there_too(modal: modal_api.Modal) -> None:
    async def go(sandbox: Sandbox) -> list[bool]:
        tests = cases(["assert f(2) == 4", "assert f(2) == 5"])
        report = await run_tests(sandbox, "def f(x):\n    return x * 2", tests, Limits())
        return [verdict.passed for verdict in report.verdicts]

    async def main() -> list[bool]:
        return await go(await open_sandbox("modal"))

    assert asyncio.run(main()) == [True, False]


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(BirlError, match=r"modal is not installed; pip install 'birl\[modal\]'"):
        asyncio.run(open_sandbox("modal"))


def test_a_wrong_call_is_noticed_by_the_stand_in() -> None:
    with pytest.raises(AssertionError):
        modal_api.Modal().Image.debian_slim(python="3.11")


def test_the_signatures_are_those_of_the_client() -> None:
    """Needs the extra `modal`."""
    client = pytest.importorskip("modal")
    from modal.container_process import ContainerProcess
    from modal.io_streams import StreamReader, StreamWriter

    places = {
        "App": client.App,
        "Image": client.Image,
        "Sandbox": client.Sandbox,
        "ContainerProcess": ContainerProcess,
        "StreamReader": StreamReader,
        "StreamWriter": StreamWriter,
    }
    for name, expected in modal_api.SIGNATURES.items():
        owner, _, function = name.partition(".")
        assert modal_api.shape(getattr(places[owner], function)) == expected, name
    assert issubclass(client.exception.AuthError, client.exception.Error)
