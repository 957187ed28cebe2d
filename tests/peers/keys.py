"""The peers' names in docs/from_trl.md and docs/from_verl.md exist in the peers: part of `make check-peers`.

    python -m tests.peers.keys

Read from the sources and YAML files of the installed packages, which are not imported.
"""

import ast
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tests.docs.pages import CODE, ROOT, tables

EARLIER = "Names of earlier versions"


def folder(package: str) -> Path:
    found = find_spec(package)
    assert found is not None and found.origin, f"{package} is not installed: make check-peers"
    return Path(found.origin).parent


def annotated(path: Path) -> set[str]:
    """Names of all fields of the dataclasses of a file, and of all parameters of its functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    fields = {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return fields | {n.arg for n in nodes if isinstance(n, ast.arg)}


def dotted(tree: dict[str, Any], prefix: str = "") -> set[str]:
    """Every key of a YAML file, sections too."""
    found = set()
    for key, value in tree.items():
        found |= {prefix + str(key)} | (dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else set())
    return found


def named(page: str, peer: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    parts = [part for part in text.split("\n## ") if not part.startswith(EARLIER)]
    rows = [row for part in parts for row in tables(part).get(peer, [])]
    return [key for row in rows for key in CODE.findall(row[0])]


def trl() -> list[str]:
    files = [*folder("trl").rglob("*.py"), folder("transformers") / "training_args.py"]
    known = set[str]().union(*(annotated(path) for path in files))
    return [key for key in named("from_trl.md", "TRL") if key.rpartition(".")[2] not in known]


def verl() -> list[str]:
    text = (folder("verl") / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    known = dotted(yaml.safe_load(text))
    sections = "".join(f".{key}." for key in known)
    keys = named("from_verl.md", "verl")
    return [k for k in keys if k not in known and not (k.endswith(".*") and f".{k[:-1]}" in sections)]


def main() -> int:
    wrong = {f"TRL {version('trl')}": trl(), f"verl {version('verl')}": verl()}
    for peer, keys in wrong.items():
        print(f"{peer}: {'all names exist' if not keys else 'has no ' + ', '.join(keys)}")
    return any(wrong.values())


if __name__ == "__main__":
    sys.exit(main())
