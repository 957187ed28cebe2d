"""What docs/serve.md shows is tried on a server."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from birl.engines import names
from birl.server.serve import ROUTES
from birl.types import SamplingParams
from tests.server.running import process

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_of_the_page(tiny: Path, tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("BIRL_CACHE", str(tmp_path))
    commands = [line for line in PAGE.splitlines() if line.startswith("curl ")]
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(commands) == 3 and len(programs) == 2
    with process(tiny, "name=arithmetic/0") as (_, url):
        for command in commands:
            words = shlex.split(command.replace("http://127.0.0.1:8000", url))
            said = subprocess.run([*words, "-s", "--fail", "-m", "30"], capture_output=True, text=True)
            assert said.returncode == 0 and said.stdout.startswith("{"), said
        for program in programs:
            capfd.readouterr()
            exec(compile(program.replace("http://127.0.0.1:8000", url), "serve.md", "exec"), {})
            assert capfd.readouterr().out.strip()
        assert names.find("arithmetic/0") == [url]


def test_every_route_is_on_the_page() -> None:
    told = {(method, path) for method, path in re.findall(r"`(GET|POST|PUT|DELETE) (/[^`]+)`", PAGE)}
    there = {(method, path.replace(":int", "")) for method, path in ROUTES if not re.search("{name:|/v1/v1/", path)}
    assert told == there
    assert set(SamplingParams.__dataclass_fields__) >= {"forced", "stop_ids"} and "`SamplingParams`" in PAGE
