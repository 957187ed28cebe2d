"""What a newcomer's slips are answered with: the place, and what to type instead."""

import json
import signal
import sys
from pathlib import Path

import pytest

from birl import hub
from birl.cli import main
from birl.cli.configured import RUNS
from birl.errors import BirlError
from birl.track.folder_lock import held

ROW = json.dumps({"prompt": "What is 3 + 4?", "answer": "7"}) + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rl good.jsonl", ["For the data in that file: data.train=good.jsonl."]),
        ("rl algorithm=gpro", ["Did you mean grpo?"]),
        ("rl env=guess", ["Did you mean guess_number?"]),
        ("eval good.jsonl", ["data.validation=good.jsonl"]),
        ("serve nosuch", ["There is no model or run of that name here."]),
        ("serve good.jsonl", ["model.path=good.jsonl"]),
        ("rl nosuch.jsonl", ["nosuch.jsonl: expected key=value", "There is no file nosuch.jsonl here."]),
        ("dpo data.train=good.jsonl data.chosen_column=", ["data.chosen_column is empty: name a column."]),
        (f"serve host={'x' * 80}", ["cannot be taken"]),
        ("rl folder", ["For the model of that folder: model=folder."]),
        ("rl --lr 1e-5", ["--lr: there is no such flag", "without dashes", "Did you mean optimizer.lr=...?"]),
        ("rl --dry-run=1 data.train=good.jsonl", ["--dry-run=1: --dry-run is a switch and takes no value"]),
        ("rl --helpp", ["Did you mean --help?"]),
        ("help nonsense", ["there is no command nonsense"]),
        ("rl --learning-rate=1e-5", ["written key=value, without dashes. Did you mean optimizer.lr?"]),
        ("rl --optimizer.lr=1e-5", ["Did you mean optimizer.lr=1e-5?"]),
        ("rl ++rollout.n=4", ["neither be added (+) nor removed (~). Did you mean rollout.group_size?"]),
        ("--verison", ["Did you mean --version?"]),
        ("plan --jsn", ["--jsn: `birl plan` has --memory GIB, --json"]),
        ("rl steps=-1 data.train=good.jsonl", ["steps=-1: must be at least 0."]),
        ("rl bad.yaml", ["bad.yaml, line 2, column 8: is not valid YAML"]),
        ("rl list.yaml", ["list.yaml: expected keys and values, such as `optimizer: {lr: 1e-5}`, not a list"]),
        ("rl badd.yaml", ["badd.yaml: cannot be read: there is no such file. Did you mean bad.yaml?"]),
        ("rl track.mlflow=http://h:5000 data.train=good.jsonl", ["export MLFLOW_TRACKING_URI=..., then track.mlflow="]),
        ("eval data.validation=good.jsonl output=/proc/x.json", ["output=/proc/x.json cannot be written"]),
        ("ledger nowhere", ["nowhere has no ledger.jsonl", "birl runs"]),
        ("checkpoints nowhere", ["There is no folder nowhere", "birl runs"]),
        ("status nowhere", ["there is no folder nowhere", "birl runs"]),
        ("rl env=guess_number env.hihg=3", ["env.hihg=3: there is no such key. Did you mean env.high?"]),
        ("plan --simulate run.gpu=4", ["Did you mean run.gpus?"]),
        ("rl data.train=folder/typed.jsonl", ["folder/typed.jsonl, row 1: prompt is a number"]),
        ("completion csh", ["There is no completion for csh. Name one shell", "bash, zsh, fish."]),
        ("cache foo", ["foo: `birl cache` has list, verify, clear NAME and clear --all."]),
        ("cache clear", ["birl cache clear NAME", "birl cache clear --all"]),
        ("checkpoints nowhere export", ["`birl checkpoints RUN export STEP FOLDER [--shard-gb N], "]),
        ("checkpoints nowhere prnue 1", ["`birl checkpoints RUN` has verify, export,", "Did you mean prune?"]),
        ("launch", ["Name a place and a command", "Places: local, torchrun,"]),
        ("launch locl", ["There is no place 'locl'", "Did you mean local?"]),
        ("launch local", ["Name what to start", "Commands: sft, rm, dpo, rl;"]),
        ("chat folder/seed=1", ["folder/seed=1"]),
        ("chat model=folder", ["folder"]),
        ("chat temperature=-1 folder", ["temperature=-1: must be at least 0."]),
        ("chat folder temprature=1", ["temprature=1: there is no such key. Did you mean temperature?"]),
        ("chat smollm2 temperature=0 top_p=0.9", ["top_p=0.9: has no effect because temperature=0 is greedy"]),
        ("chat folder nowhere", ["birl chat takes one model or run, not 2: folder nowhere."]),
    ],
)
def test_a_slip_is_answered_with_the_fix(
    words: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIRL_TOKEN", "secret")
    Path("good.jsonl").write_text(ROW)
    Path("folder/seed=1").mkdir(parents=True)  # as --multirun names them
    Path("folder/typed.jsonl").write_text('{"prompt": 5, "answer": "5"}\n')
    Path("bad.yaml").write_text("seed: 1\n  steps: 3\n")
    Path("list.yaml").write_text("- a\n")
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in said), error
    assert len(error.splitlines()) == (2 if "mlflow" in words else 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_library_is_imported(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes a ModuleNotFoundError of it."""

    def importing(name: str) -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError(f"could not import {name}") from error

    monkeypatch.setattr("birl.cli.import_module", importing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
    try:
        assert main(["chat"]) == 128 + number
        assert capsys.readouterr().err == f"birl: {'interrupted' if number == signal.SIGINT else 'terminated'}\n"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_its_code(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the command does then: here it cleans up."""
    cleaned: list[int] = []

    def diagnosed(words: list[str]) -> int:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)
        return 0

    monkeypatch.setattr("birl.doctor.run", diagnosed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["doctor"]) == 128 + number and cleaned == [number]
    finally:
        signal.signal(signal.SIGINT, before)


def test_help_of_a_command_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "rl", "optimizer.lr"]) == 0
    page = capsys.readouterr().out
    assert main(["rl", "--help", "optimizer.lr"]) == 0
    assert page == capsys.readouterr().out and "optimizer.lr=1e-06" in page


def test_help_of_a_word_without_a_key_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--help", "--trust_remote_code"]) == 0
    assert "is called trust_remote_code. TRL's word, without a key here: never" in capsys.readouterr().out


def test_a_folder_of_another_command(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_text(json.dumps({"prompt": "?", "answer": "7", "chosen": "7", "rejected": "8"}) + "\n")
    words = [f"model.path={tiny}", "data.train=my.jsonl", "steps=1", "threads=1", "run=here", "track.console=off"]
    assert main(["sft", *words, "track.tensorboard=false", "track.report=false"]) == 0
    assert not Path("here/config.yaml").read_text().startswith("#")  # `sft` has no presets that a run is known by
    capsys.readouterr()  # kernels may have been compiled
    assert main(["rm", *words]) == 2
    error = capsys.readouterr().err
    assert "here belongs to a run of another command than `birl rm`" in error and len(error.splitlines()) == 1


def test_a_misspelt_model_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    monkeypatch.setattr(hub, "missing", lambda name, kind: "the hub cannot be reached")
    with pytest.raises(BirlError, match=r"Did you mean model\?"):
        hub.check_model("model.path", "modle")


def test_a_run_without_a_compiler_says_that_it_is_slower(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("birl.kernels.compiling.compiler", lambda: None)
    Path("my.jsonl").write_text(json.dumps({"prompt": "?", "response": "7"}) + "\n")
    assert main(["sft", f"model.path={tiny}", "data.train=my.jsonl", "steps=1", "threads=1", "track.report=false"]) == 0
    said = "".join(capsys.readouterr())
    assert "Training is slower without birl's kernels: no C compiler (install gcc, or set CC)." in said


REWARD = "def score(completions, **_):\n    return [0.0 for _ in completions]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rl data.train=nosuch.jsonl", "nosuch.jsonl: no such file or folder"),
        ("rl DATA data.validation=nosuch.csv", "nosuch.csv: no such file or folder"),
        ("rl DATA env=nosuch", "env.kind=nosuch: must be"),
        ("rl DATA env=agent.py:act", "-m pip install no_such_package"),
        ("rl DATA reward=nosuch.py:score", "there is no file nosuch.py"),
        ("rl DATA reward=mine.py:scores", "has no function scores. Did you mean score?"),
        ("rl DATA reward=mine.py:sco", "has no function sco. Did you mean score?"),
        ("rl DATA reward=method.py:other", "has no function other. It has: score."),
        ("rl DATA reward=given:score", "was handed over by a Python program"),
        ("rl DATA reward=no.such:score", "there is no module no.such"),
        ("rl DATA reward=birl.rewards.nosuch:score", "there is no module birl.rewards.nosuch"),
        ("rl DATA algorithm.surrogate=mine.py:scores", "has no function scores. Did you mean score?"),
        ("rl DATA reward=needs.py:score", "needs.py imports no_such_package, which is not installed. Install it"),
        ("rl DATA engine.kind=vllm", "-m pip install vllm), name a Python that has it (engine.python=PATH)"),
        ("eval data.validation=rows.jsonl engine.kind=sglang", "sglang is not installed for this Python"),
        ("rl DATA run=" + "x" * 300, "run=" + "x" * 80 + "...: this name is too long for a file; give a shorter one"),
        ("rl DATA reward=method.py:Judge", "Judge is a class; name a function, or an object of it"),
        ("rl DATA reward=wrong.py:score", "wrong.py, line 1: expected ':'"),
        ("rl DATA run=rows.txt/run", "Cannot write into the run folder"),
        ("rl DATA run=taken", "taken is in use by another birl process"),
        ("rl DATA run=used", "used belongs to a run with another configuration:"),
        ("sft DATA run=used", "used belongs to a run of another command than `birl sft`"),
        ("rl DATA steps=1 resume=" + "x/" * 2500, "resume=x/x"),
        ("rl DATA long.yaml", "long.yaml, line 2: " + "x" * 80),
        ("rl steps=1 data.train=[" + "x" * 300 + ".jsonl,a.jsonl]", "data.train=xxx"),
        ("rl DATA algorithm.surrogate=clp", "Did you mean clip?"),
        ("rl DATA algorithm.advantage=relativ", "Did you mean relative?"),
        ("rl DATA checkpoint.store=s4://bucket", "fsspec knows no s4://. Write a URL"),
        ("rl DATA resume=s4://bucket", "fsspec knows no s4://"),
        ("rl DATA resume=nosuch", "resume=nosuch: there is no such checkpoint folder"),
        ("rl DATA resume=file:///nosuch", "resume=file:///nosuch: there is no such folder"),
        ("rl data.train=nosuch", "nosuch: no such file or folder here, and the Hugging Face hub"),
        ("rl DATA data.validation=test@no/such", "no/such: no such file or folder here, and the Hugging Face hub"),
        ("rl DATA model=no/such", "model.path=no/such: there is no such folder here, and the Hugging Face hub"),
        ("rl DATA model=rows.jsonl", "model.path=rows.jsonl is a file"),
        ("rl DATA reward=model reward.model=nosuch", "reward.model=nosuch: there is no such folder here"),
        ("rl DATA algorithm=ppo critic.path=nosuch", "critic.path=nosuch: there is no such folder here"),
        ("rl DATA algorithm=distill algorithm.teacher=nosuch", "algorithm.teacher=nosuch: there is no such folder"),
        ("sft data.train=nosuch", "nosuch: no such file or folder here"),
        ("rl data.train=rows.jsonl@train", "rows.jsonl@train: the split comes first, as in train@rows.jsonl."),
        ("rl data.train=asked.jsonl", "asked.jsonl has no column ground_truth, answer, solution, which"),
        ("eval data.validation=asked.jsonl", "reward.functions=math compares with. It has the columns prompt."),
        ("rl data.train=nothing.json", "Its rows have no columns at all.\n"),
        ("rl data.train=empty.jsonl", "empty.jsonl is empty"),
        ("dpo data.train=bare", "The folder bare holds no data files"),
        ("rl data.train=rows.txt", "unknown file type '.txt'"),
        *[(f"{c} data.train=broken.jsonl", "broken.jsonl, line 2: broken JSON") for c in ("rl", "sft", "rm", "dpo")],
        ("eval data.validation=broken.jsonl", "broken.jsonl, line 2: broken JSON"),
        ("rl data.train=ragged.csv", "ragged.csv, line 2: 3 fields, but the header has 2"),
        ("rl data.train=roles.jsonl", "roles.jsonl, row 1: messages[0].role is 'usr'"),
        ("sft DATA data.validation=roles.jsonl", "roles.jsonl, row 1: messages[0].role is 'usr'"),
        ("rl DATA data.prompt_column=promt", "data.prompt_column=promt: rows.jsonl has no such column"),
        ("rl DATA data.answer_column=answr", "Did you mean data.answer_column=answer?"),
        ("sft DATA data.answer_column=respons", "has no such column"),
        ("rm DATA data.chosen_column=chosn", "has no such column"),
        ("sft data.train=null.jsonl", "null.jsonl, row 2: answer is null"),
        ("rl data.train=null.jsonl", "null.jsonl, row 2: `answer` is empty"),
        ("sft data.train=other.jsonl", "other.jsonl has no column messages, prompt, question"),
        ("rl data.train=other.jsonl", "other.jsonl has no column messages, prompt, question"),
        ("sft data.train=pairs.jsonl", "Pairs of answers are for `birl dpo` and `birl rm`."),
        ("dpo DATA", "Texts and answers to learn are for `birl sft`."),
        ("dpo data.train=votes.jsonl", "set preference.loss=kto"),
        ("rm data.train=votes.jsonl", "Answers with a label are for `birl dpo preference.loss=kto`."),
        ("sft data.train=votes.jsonl", "Answers with a label are for `birl dpo preference.loss=kto`."),
        ("serve model=small.gguf host=0.0.0.0", "so it needs a token"),
        ("serve model=hollow", "hollow is not a model folder: config.json is missing"),
        ("rl DATA model=mute", "mute has no tokenizer"),
        ("chat mute", "mute has no tokenizer"),
        ("rm data.train=pairs.jsonl model=nosuch", "model.path=nosuch: there is no such folder here"),
        ("dpo data.train=pairs.jsonl model=nosuch.gguf", "model.path=nosuch.gguf: there is no such file"),
        ("sft DATA data.train_on=[assistent]", "data.train_on=assistent: there is no such role"),
        ("dpo DATA preference.loss=dop", "Did you mean dpo?"),
        ("eval data.validation=nosuch", "nosuch: no such file or folder here"),
        ("eval data.validation=rows.jsonl model=nosuch", "model.path=nosuch: there is no such folder here"),
        ("serve model=nosuch", "model.path=nosuch: there is no such folder here"),
        ("chat nosuch", "model=nosuch: there is no such folder here"),
        ("chat mtue", "or smollm2. Did you mean mute?"),
        ("chat smal.gguf", "model=smal.gguf: there is no such file. Did you mean small.gguf?"),
        ("plan model=nosuch", "model.path=nosuch: there is no such folder here"),
        ("checkpoints nosuch export last new", "There is no folder nosuch"),
        ("launch local rl data.train=nosuch", "nosuch: no such file or folder here"),
        ("launch local rl env=guess_numbr --dry-run", "Did you mean guess_number?"),
        ("launch torchrun sft DATA model=nosuch", "model.path=nosuch: there is no such folder here"),
    ],
)
def test_what_is_not_there_is_told_before_torch_is_imported(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(name: str) -> None:
        raise AssertionError(f"{name} was imported first")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in [n for n in sys.modules if n.partition(".")[0] in ("torch", "transformers", "datasets")]:
        monkeypatch.setitem(sys.modules, name, None)  # an import would be an ImportError
    for name in [*RUNS.values(), "birl.plan.run", "birl.parallel.machine"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    row = '{"prompt": "1 + 1?", "answer": "2"}\n'
    for name, text in {
        "rows.jsonl": row,
        "rows.txt": row,
        "empty.jsonl": "",
        "broken.jsonl": row + '{"prompt": \n',
        "long.yaml": f"steps: 1\nrun: '{'x' * 300}'\n",
        "ragged.csv": "prompt,answer\na,b,c\n",
        "roles.jsonl": '{"messages": [{"role": "usr", "content": "x"}], "answer": "1"}\n',
        "null.jsonl": row + '{"prompt": "x", "answer": null}\n',
        "other.jsonl": '{"instruction": "x", "reply": "y"}\n',
        "pairs.jsonl": '{"prompt": "x", "chosen": "y", "rejected": "z"}\n',
        "votes.jsonl": '{"prompt": "x", "completion": "y", "label": true}\n',
        "asked.jsonl": '{"prompt": "x"}\n',
        "nothing.json": "{}",
        "wrong.py": "def score(completions)\n",
        "used/metrics.jsonl": '{"step": 1}\n',
        "used/config.json": '{"algorithm.baseline": "mean"}',
        "bare/README": "",
        "hollow/README": "",
        "mute/config.json": "{}",
        "mute/model.safetensors": "",
        "small.gguf": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "method.py").write_text(f"{REWARD}\nclass Judge:\n    def __call__(self): ...\n")
    (tmp_path / "needs.py").write_text(f"import no_such_package\n{REWARD}")
    (tmp_path / "agent.py").write_text("import no_such_package\n\ndef act(task, base_url):\n    return 0.0\n")
    monkeypatch.setattr("birl.cli.configured.load", loaded)
    with held(tmp_path / "taken"):
        assert main(words.replace("DATA", "data.train=rows.jsonl").split()) == 2
    assert said in capsys.readouterr().err
