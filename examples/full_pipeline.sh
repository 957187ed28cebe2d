#!/bin/sh
# SmolLM2-135M-Instruct through every stage, on two CPU cores in about ten minutes:
#
#     SFT -> reward model -> RL against it         and        SFT -> DPO
#
#     . .venv/bin/activate; sh examples/full_pipeline.sh [FOLDER]        (default: runs/pipeline)
#
# Started again, it goes on where it was. The last thing it prints is a table of held-out accuracy, which only `birl eval`
# measures: no stage sees those problems, and the reward model never sees the right answers to them.
set -e
cd "$(dirname "$0")/.."
out=${1:-runs/pipeline}
data=examples/data
arithmetic=recipes/data/arithmetic
mkdir -p "$out"

export_model() { test -d "$out/$1-model" || birl checkpoints "$out/$1" export last "$out/$1-model"; }
measure() { test -f "$out/$1.json" || birl eval model="$2" data.validation=$arithmetic/validation.jsonl validation.max_tokens=32 output="$out/$1.json"; }

measure base smollm2

birl sft data.train=$data/sft.jsonl batch_size=16 optimizer.lr=2e-5 epochs=2 run="$out/sft"
export_model sft
measure sft "$out/sft-model"

birl dpo model="$out/sft-model" data.train=$data/pairs.jsonl data.validation=$data/held_out_pairs.jsonl batch_size=32 \
    optimizer.lr=1e-5 preference.nll_coef=0.2 preference.reference=precomputed epochs=2 run="$out/dpo"
export_model dpo
measure dpo "$out/dpo-model"

birl rm model="$out/sft-model" data.train=$data/pairs.jsonl data.validation=$data/held_out_pairs.jsonl batch_size=32 \
    optimizer.lr=4e-5 epochs=3 run="$out/rm"
export_model rm

birl rl model="$out/sft-model" data.train=$arithmetic/train.jsonl reward.functions=[model] reward.model="$out/rm-model" \
    reward.timeout=60 algorithm=grpo algorithm.kl_coef=0.02 rollout.prompts=8 rollout.group_size=8 rollout.max_tokens=32 \
    optimizer.lr=3e-5 steps=24 learner.tokens_per_microbatch=2048 run="$out/rl"
export_model rl
measure rl "$out/rl-model"

python - "$out" <<'TABLE'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
seconds = {name: json.loads((out / name / "summary.json").read_text())["seconds"] for name in ("sft", "dpo", "rm", "rl")}
pairs = json.loads((out / "rm" / "validation.jsonl").read_text().splitlines()[-1])["validation/accuracy"]
print(f"\nreward model: {pairs:.3f} of the held-out pairs in the right order ({seconds['rm']:.0f} s)\n")
print(f"{'model':<28} {'held-out accuracy':>18} {'training [s]':>14}")
rows = (("SmolLM2-135M-Instruct", "base"), ("SFT", "sft"), ("SFT, DPO", "dpo"), ("SFT, RL on reward model", "rl"))
for label, name in rows:
    score = json.loads((out / f"{name}.json").read_text())["metrics"]["validation/all/score"]
    print(f"{label:<28} {score:>18.3f} {seconds.get(name, 0):>14.0f}")
TABLE
