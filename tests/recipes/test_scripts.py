"""Scripts beside the package, which no other test starts: what they import of it is there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("recipes", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_script_imports_of_the_project_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("birl", "benchmarks")):
            here = ROOT.joinpath(*str(node.module).split("."))
            files = {part.stem for part in here.glob("*")} if here.is_dir() else set()
            wanted = [alias.name for alias in node.names if alias.name not in files]
            if wanted:
                module = importlib.import_module(str(node.module))
                missing = [name for name in wanted if not hasattr(module, name)]
                assert not missing, f"line {node.lineno}: {node.module} has no {missing}"
