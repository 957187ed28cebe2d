#!/bin/sh
# SmolLM2-135M-Instruct through every stage, on two CPU cores in about five minutes:
#
#     SFT -> reward model -> RL against it         and        SFT -> DPO
#
#     . .venv/bin/activate; sh examples/full_pipeline.sh [FOLDER]        (default: runs/pipeline)
#
# Started again, it goes on where it was. SFT teaches two forms of an answer, half and half; the pairs prefer one of them,
# "3 * 4 = 12.", if it is right. The table at the end has, on held-out problems: how many answers are right, and how many
# have that form. The reward model never sees those problems.
set -e
cd "$(dirname "$0")/.."
out=${1:-runs/pipeline}
data=examples/data
arithmetic=recipes/data/arithmetic
mkdir -p "$out"

finished() { test -d "$out/$1-model" || birl checkpoints "$out/$1" export last "$out/$1-model"; }
measure() {
    test -f "$out/$1.json" || birl eval model="$2" data.validation=$arithmetic/validation.jsonl validation.max_tokens=24 \
        data.max_validation_samples=100 output="$out/$1.json"
}

measure base smollm2

birl sft data.train=$data/sft.jsonl batch_size=16 optimizer.lr=2e-5 epochs=2 run="$out/sft"
finished sft
measure sft "$out/sft-model"

birl dpo model="$out/sft-model" data.train=$data/pairs.jsonl data.validation=$data/held_out_pairs.jsonl batch_size=32 \
    optimizer.lr=4e-6 preference.nll_coef=0.2 preference.reference=precomputed run="$out/dpo"
finished dpo
measure dpo "$out/dpo-model"

birl rm model="$out/sft-model" data.train=$data/pairs.jsonl data.validation=$data/held_out_pairs.jsonl batch_size=32 \
    optimizer.lr=4e-5 run="$out/rm"
finished rm

birl rl model="$out/sft-model" data.train=$arithmetic/train.jsonl reward.functions=[model] reward.model="$out/rm-model" \
    reward.timeout=60 algorithm=grpo algorithm.kl_coef=0.02 rollout.prompts=8 rollout.group_size=8 rollout.max_tokens=24 \
    optimizer.lr=2e-5 steps=16 learner.tokens_per_microbatch=2048 checkpoint.every=0 run="$out/rl"
finished rl
measure rl "$out/rl-model"

python - "$out" <<'TABLE'
import json, re, sys
from pathlib import Path

out = Path(sys.argv[1])
seconds = {name: json.loads((out / name / "summary.json").read_text())["seconds"] for name in ("sft", "dpo", "rm", "rl")}
pairs = json.loads((out / "rm" / "validation.jsonl").read_text().splitlines()[-1])["validation/accuracy"]
print(f"\nreward model: {pairs:.3f} of the held-out pairs in the right order ({seconds['rm']:.0f} s)\n")
print(f"{'model':<26}{'right':>8}{'preferred form':>16}{'training [s]':>14}")
rows = (("SmolLM2-135M-Instruct", "base"), ("SFT", "sft"), ("SFT, DPO", "dpo"), ("SFT, RL on reward model", "rl"))
for label, name in rows:
    found = json.loads((out / f"{name}.json").read_text())
    form = [bool(re.fullmatch(r"\d+ [+*] \d+ = \d+\.?", a["completion"].strip())) for a in found["answers"]]
    score = found["metrics"]["validation/all/score"]
    print(f"{label:<26}{score:>8.2f}{sum(form) / len(form):>16.2f}{seconds.get(name, 0):>14.0f}")
TABLE
