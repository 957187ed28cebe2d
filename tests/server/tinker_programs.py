"""Programs of Tinker's cookbook, as they are released, against `birl tinker` with a tiny model and data on disk.

`make check-tinker` runs them all and counts; `python -m tests.server.tinker_programs rl_loop` runs some.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.tinker_server import KEYS, serving
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
#: the cookbook knows their formats; the server has another model
NAMES = ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3.5-9B")
MODEL = f"model_name={NAMES[0]}"
RECIPES = "tinker_cookbook.recipes"
GONE = {"behavior_if_log_dir_exists": "delete"}


@dataclass(frozen=True, slots=True)
class Program:
    """A module of the cookbook and its options; each gets a log_path of its own."""

    module: str
    options: tuple[str, ...] = ()
    kl: bool = False  # it tells the KL between sampler and trainer
    log: str = "log_path"  # the option for its folder; "": it takes TINKER_COOKBOOK_RUNS_DIR
    beside: str = ""  # an environment that has a package more

    def words(self, log: Path) -> list[str]:
        place = [f"{self.log}={log}"] if self.log else []
        return [str(PYTHON), "-m", f"{RECIPES}.{self.module}", *self.options, *place]


ARITHMETIC = (
    "dataset_builder=tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder",
    "dataset_builder.batch_size=2", "dataset_builder.group_size=4", "dataset_builder.renderer_name=qwen3",
    "dataset_builder.n_batches=2", "dataset_builder.include_fewshot=True",
    f"dataset_builder.model_name_for_tokenizer={NAMES[0]}",
)  # fmt: skip
CONVERSATIONS = (
    "dataset_builder=tinker_cookbook.supervised.data:FromConversationFileBuilder",
    "dataset_builder.file_path=distilled.jsonl", "dataset_builder.test_size=4",
    f"dataset_builder.common_config.model_name_for_tokenizer={NAMES[0]}",
    "dataset_builder.common_config.renderer_name=qwen3", "dataset_builder.common_config.max_length=512",
    "dataset_builder.common_config.batch_size=4",
)  # fmt: skip
SMALL = ("group_size=4", "max_steps=2", "behavior_if_log_dir_exists=delete")
PROGRAMS = {
    "sl_loop": Program("sl_loop", (MODEL, "batch_size=4", "max_steps=2", "lora_rank=8", "max_length=512")),
    "rl_loop": Program("rl_loop", (MODEL, "batch_size=2", "group_size=4", "max_steps=2", "max_tokens=8")),
    "rl_basic": Program(
        "rl_basic",
        (MODEL, *ARITHMETIC, "max_steps=2", "max_tokens=8"),
        kl=True,
    ),
    "math_rl": Program("math_rl.train", (MODEL, *SMALL, "groups_per_batch=2", "eval_every=0"), kl=True),
    "guess_number": Program(
        "multiplayer_rl.guess_number.train",
        (MODEL, *SMALL, "renderer_name=qwen3", "batch_size=2", "max_tokens=6", "eval_every=0"),
        kl=True,
    ),
    "text_arena": Program(
        "multiplayer_rl.text_arena.train",
        (MODEL, *SMALL[1:], "renderer_name=qwen3", "batch_size=2", "max_tokens=6", "eval_every=0",
         "num_train_datapoints=8", "num_test_datapoints=2"),
    ),
    "shorter": Program(
        "preference.shorter.train",
        (MODEL, *SMALL, "renderer_name=qwen3", "batch_size=2", "max_tokens=8", "eval_every=0"),
        kl=True,
    ),
    "dpo": Program("preference.dpo.train", (MODEL, *SMALL[1:], "batch_size=4", "max_length=512")),
    "prompt_distillation": Program(
        "prompt_distillation.train",
        (MODEL, *SMALL[1:], "file_path=distilled.jsonl", "batch_size=4", "lora_rank=4", "eval_every=0",
         "max_length=512"),
    ),
    "sdft": Program(
        "sdft.train",
        (MODEL, *SMALL, "dataset=toolalpaca", "toolalpaca_data_path=toolalpaca", "groups_per_batch=2", "max_tokens=8",
         "lora_rank=4", "topk=5", "eval_every=0"),
    ),
    "on_policy_distillation": Program(
        "distillation.on_policy_distillation",
        (MODEL, *SMALL, f"teacher_model={NAMES[0]}", "groups_per_batch=2", "max_tokens=8", "lora_rank=4",
         "eval_every=0"),
        kl=True,
    ),
    "rl_numerics_check": Program(
        "rl_numerics_check.train",
        (MODEL, *SMALL, "renderer_name=qwen3", "groups_per_batch=2", "max_tokens=8", "task.page_chars=100",
         "task.num_pages_min=2", "task.num_pages_max=3", "max_trajectory_tokens=6000"),
        kl=True,
    ),
    "sl_inspect": Program(
        "sl_basic",
        (MODEL, *CONVERSATIONS, "max_steps=2", "lora_rank=4", "eval_every=1",
         "evaluator_builders.0=tinker_cookbook.eval.inspect_evaluators:InspectEvaluatorBuilder",
         "evaluator_builders.0.tasks=asked.py", "evaluator_builders.0.renderer_name=qwen3",
         f"evaluator_builders.0.model_name={NAMES[0]}", "evaluator_builders.0.max_tokens=8",
         "evaluator_builders.0.log_dir=inspect"),
        beside=".venv-agents",
    ),
    "rl_streams": Program(  # a step's groups in parts, each as it is there
        "rl_basic",
        (MODEL, *ARITHMETIC, "max_steps=2", "max_tokens=8", "loss_fn=ppo", "num_substeps=1",
         "stream_minibatch_config.groups_per_batch=2", "stream_minibatch_config.num_minibatches=2"),
        kl=True,
    ),
    "rl_async": Program("math_rl.train", (MODEL, *SMALL, "groups_per_batch=2", "max_steps_off_policy=1",
                                          "eval_every=1", "max_tokens=8")),
    "sl_basic": Program(
        "sl_basic",
        (MODEL, *CONVERSATIONS, "max_steps=2", "lora_rank=4", "eval_every=1"),
    ),
    "chat_sl": Program("chat_sl.train", (MODEL, *SMALL[1:], "batch_size=4", "lora_rank=4", "eval_every=1",
                                         "save_every=1", "rolling_save_every=1")),
    "off_policy_reasoning": Program(
        "distillation.off_policy_reasoning",
        (MODEL, *SMALL[1:], "renderer_name=qwen3", "batch_size=4", "lora_rank=4", "buffer_size=8", "max_prompts=8",
         "max_length=512"),
    ),
    "on_policy_multi_teacher": Program(
        "distillation.on_policy_multi_teacher",
        (MODEL, *SMALL, f"deepmath_teacher_model={NAMES[0]}", f"tulu3_teacher_model={NAMES[1]}", "max_tokens=8",
         "deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2", "lora_rank=4", "eval_every=0"),
        kl=True,
    ),
    "twenty_questions": Program(
        "multiplayer_rl.twenty_questions.train",
        (MODEL, *SMALL[1:], "group_size=2", "renderer_name=qwen3", "batch_size=2", "max_tokens=6", "eval_every=0"),
        kl=True,
    ),
    "rubric": Program(
        "rubric.train",
        (MODEL, *SMALL[1:], "train_group_size=2", "groups_per_batch=2", "max_tokens=8", "renderer_name=qwen3",
         f"grader_llm_name={NAMES[0]}", "grader_renderer_name=qwen3", "train_jsonl_path=rubric.jsonl",
         "test_jsonl_path=rubric.jsonl", "lora_rank=4", "eval_every=0"),
        kl=True,
    ),
    "rlhf": Program(
        "preference.rlhf.rlhf_pipeline",
        (f"base_model={NAMES[0]}", "max_steps=2", "batch_size=2", "lora_rank=4", "max_length=512", "rl_max_tokens=8",
         "rl_group_size=2", "eval_every=0"),
        log="",
    ),
    "decisions": Program(  # a loss at the client, and log-probs of chosen tokens of a prompt
        "decisions.forecasting",
        (MODEL, "data_path=markets.csv", "renderer_name=qwen3", "batch_size=2", "max_steps=2", "lora_rank=4",
         "eval_every=1", SMALL[2]),
    ),
    "code_rl": Program(
        "code_rl.train",
        (MODEL, *SMALL, "groups_per_batch=2", "max_tokens=8", "renderer_name=qwen3", "lora_rank=4", "eval_every=0"),
        kl=True,
    ),
}  # fmt: skip

#: a task of Inspect
ASKED = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def asked():
    rows = MemoryDataset([Sample(input="Add 1 and 2.", target="3")], name="asked")
    return Task(dataset=rows, solver=generate(), scorer=includes())
"""


def world(folder: Path) -> Path:
    """A model whose context holds the programs' prompts byte by byte, its tokenizer under the names that the programs
    ask for, and their data sets, as the hub has them; gives the model's folder."""
    words, model = tiny_tokenizer(318), folder / "model"
    words.add_tokens(["<think>", "</think>"])  # a token each, as renderers expect
    made = tiny_model(vocab=len(words))
    made.config.max_position_embeddings = 8192
    made.save_pretrained(model)
    words.save_pretrained(model)
    for name in NAMES:
        place = folder / name
        place.mkdir(parents=True)
        for file in (*model.glob("tokenizer*"), *model.glob("special*"), *model.glob("*.jinja")):
            (place / file.name).write_bytes(file.read_bytes())
        (place / "config.json").write_bytes((model / "config.json").read_bytes())
    said = [{"role": "user", "content": "Add 1 and 2."}, {"role": "assistant", "content": "It is 3."}]
    chosen, other = "\n\nHuman: Hello?\n\nAssistant: Hi.", "\n\nHuman: Hello?\n\nAssistant: Go away."
    rows(folder / "openai/gsm8k", "main", question="What is 1 + 2?", answer="1 + 2 = 3\n#### 3")
    rows(folder / "HuggingFaceH4/no_robots", "default", messages=said, prompt="Add 1 and 2.")
    rows(folder / "Anthropic/hh-rlhf", "default", chosen=chosen, rejected=other)
    rows(folder / "allenai/tulu-3-sft-mixture", "default", messages=said)
    turns = [{"from": "human", "value": "Add 1 and 2."}, {"from": "gpt", "value": "It is 3."}]
    rows(folder / "open-thoughts/OpenThoughts3-1.2M", "default", conversations=turns)
    tests = json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin_stdout"}])
    code = ("primeintellect", "taco", "lcbv5", "codeforces")
    rows(folder / "agentica-org/DeepCoder-Preview-Dataset", *code, problem="Add two numbers.", tests=tests)
    rubric = {"rubric_str": "Is it 3?", "extraction_regex": "<score>(.*?)</score>",
              "grader_output_format_instruction": "Write <score>0</score> or <score>1</score>."}  # fmt: skip
    asked = json.dumps({"convo": said[:1], "rubric_items": [rubric]})
    (folder / "rubric.jsonl").write_text(f"{asked}\n" * 8)
    (folder / "asked.py").write_text(ASKED)
    (folder / "markets.csv").write_text(
        "submission_id,event_ticker,title,snapshot_time,close_time,market_outcome,category,markets,sources\n"
        + "".join(
            f"{i},E{i},Rain?,2025-{month}-01,2025-{month}-05,\"{{'Yes': {i % 2}}}\",Weather,\"['Yes']\","
            "\"[{'title': 'A', 'summary': 'B', 'ranking': 1}]\"\n"
            for i, month in enumerate([10] * 8 + [11] * 4)
        )
    )
    rows(folder / "zwhe99/DeepMath-103K", "default", question="What is 1 + 2?", final_answer="3")
    rows(
        folder / "Salesforce/wikitext", "wikitext-103-raw-v1", count=400, text="The river runs by the old stone house. "
    )
    line = json.dumps({"messages": said})
    (folder / "distilled.jsonl").write_text(f"{line}\n" * 40)
    golden = [{"prompt": "Add 1 and 2.", "golden_response": ["It is 3."]}] * 20
    (folder / "golden.json").write_text(json.dumps(golden))
    code = (
        "import datasets, json; datasets.Dataset.from_list(json.load(open('golden.json'))).save_to_disk('toolalpaca')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    return model


def rows(folder: Path, *configs: str, count: int = 40, **row: Any) -> None:
    """A data set with the splits train and test in each configuration."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * count)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    every = "".join(f"- config_name: {config}\n  data_files:\n{files}" for config in configs)
    (folder / "README.md").write_text(f"---\nconfigs:\n{every}---\n")


def packages(program: Program) -> list[Path]:
    """Of the environment beside it; none where that is missing."""
    return [*(ROOT / program.beside).glob("lib/python*/site-packages")] if program.beside else []


def missing(name: str) -> bool:
    return bool(PROGRAMS[name].beside) and not packages(PROGRAMS[name])


def environment(folder: Path, url: str, program: Program, log: Path) -> dict[str, str]:
    return os.environ | {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": KEYS["alice"],
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(map(str, packages(program))),
        "TINKER_COOKBOOK_RUNS_DIR": str(log),
    }


def play(name: str, folder: Path, url: str) -> dict[str, Any]:
    """Run a program to its end; what it logged last. Raises `AssertionError` with what it said where it failed."""
    log, program = folder / "logs" / name, PROGRAMS[name]
    said = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    env = environment(folder, url, program, log)
    done = subprocess.run(program.words(log), cwd=folder, env=env, timeout=500, **said)
    assert done.returncode == 0, f"{name}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    files = [*log.glob("**/metrics.jsonl")]  # some put a folder of their own into it
    assert files, f"{name} has logged nothing"
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    result: dict[str, Any] = {}
    for line in lines:
        result |= line
    return result


def main(names: list[str]) -> int:
    passed = 0
    names = names or [name for name in PROGRAMS if not missing(name)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = world(folder)
        with serving(model, folder / "state", f"names=[{','.join(NAMES)}]") as server:
            for name in names:
                began = time.monotonic()
                try:
                    found = play(name, folder, server.url)
                    kl = max((abs(v) for k, v in found.items() if k.startswith("optim/kl_sample_train")), default=None)
                    passed += 1
                    told = "" if kl is None else f", KL between sampler and trainer {kl:.1e}"
                    print(f"{name}: passed in {time.monotonic() - began:.0f} s{told}", flush=True)
                except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                    print(f"{name}: FAILED\n{error}", flush=True)
    print(f"{len(names)} programs run, {passed} passed")
    return int(passed != len(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
