"""What users may import is listed, loads quickly, and carries types."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import birl
from tests.packaging import public_api

ROOT = Path(__file__).parents[2]


def test_the_public_api_is_as_listed() -> None:
    changed = public_api.difference()
    assert not changed, (
        f"If this is meant, `make api` writes docs/public_api.txt anew; tell users in CHANGELOG.md.\n{changed}"
    )


def test_a_changed_default_or_name_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(source: str) -> list[str]:
        module = ModuleType("birl.made")
        module.__dict__["__name__"] = "birl.made"
        exec(source, module.__dict__)
        return list(public_api.lines(module))

    before = of("def f(a, *, b=1): ...\nclass C:\n    def g(self): ...\n    def _h(self): ...")
    assert before == ["class C", "  .g(self)", "f(a, *, b=1)"]
    for changed in ("def f(a, *, b=2): ...", "def f(a, b=1): ...", "def g(a, *, b=1): ...", "def f(c, *, b=1): ..."):
        assert of(changed) != before[2:]


def test_what_the_package_exports_is_there() -> None:
    assert all(hasattr(birl, name) for name in birl.__all__)
    assert "nothing" not in dir(birl)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = birl.nothing


def test_the_version_is_written_once() -> None:
    """pyproject.toml and `birl --version` take it from birl/__init__.py; the changelog has a section for it."""
    done = subprocess.run([sys.executable, "-m", "birl", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == f"birl {birl.__version__}"
    assert f"## {birl.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    again = [p for p in (ROOT / "birl").rglob("*.py") if f'"{birl.__version__}"' in p.read_text()]
    assert again == [ROOT / "birl" / "__init__.py"]
    assert version("birl")  # the installed metadata exists; an editable one may be older
