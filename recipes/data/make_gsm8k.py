"""Write `gsm8k/train.jsonl` and `validation.jsonl`: the problems of GSM8K's training set that take at most two steps.

    python recipes/data/make_gsm8k.py TRAIN.jsonl      the committed files, byte for byte

TRAIN.jsonl is grade_school_math/data/train.jsonl of https://github.com/openai/grade-school-math (MIT, gsm8k/LICENSE).
Every eighth problem is held out; `--most` of the others are taken. The notes of the calculator (<<48/2=24>>) go.
"""

import argparse
import json
import re
from pathlib import Path

NOTE = re.compile(r"<<[^>]*>>")
HERE = Path(__file__).parent / "gsm8k"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--most", type=int, default=1600)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.file.read_text(encoding="utf-8").splitlines()]
    short = [row for row in rows if 1 <= len(NOTE.findall(row["answer"])) <= 2 and len(row["question"]) <= 250]
    held = short[::8][:200]
    others = [row for i, row in enumerate(short) if i % 8][: args.most]
    for name, chosen in (("train", others), ("validation", held)):
        lines = (json.dumps({"question": r["question"], "answer": NOTE.sub("", r["answer"])}) for r in chosen)
        (args.out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{args.out / name}.jsonl: {len(chosen)} problems")


if __name__ == "__main__":
    main()
