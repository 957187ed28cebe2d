"""birl's algorithm functions beside those of TRL and verl themselves, on random inputs: `make check-peers`.

Ends with 1 when what should agree does not, or when a difference that is stated is not there.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "peers_check.md"
HEAD = """# Checked against the peers

Written by `make check-peers CHECK_FLAGS=--write`, which installs TRL {trl} and verl {verl} into an environment of
its own and calls their functions and birl's on the same random inputs: lengths, group sizes, masks and numbers
differ from seed to seed ({seeds} seeds; float64 where the peer has it; PyTorch {torch}). No formula of a peer is
typed again: a loss inside a trainer is that trainer's method, on an object made without its constructor.

"value" and "gradient" are the largest difference over all seeds, relative to the largest number of the tensor; a
dash: there is no gradient. Equal is at most {limit:g}. Where the definitions differ on purpose, the two columns are
what is left after the stated difference is taken out (`tests/peers/`), and "as they are" is the difference with it.
The papers are in [papers.md](papers.md).

{agreed} of {all} comparisons are equal as they are, {differing} after a stated difference. Not here, because
neither peer has it: MaxRL, Pass@k training, the Kimi length reward, GAE over turns, M2PO, A-3PO, the mean of
groups; and TRL {trl} has no PPO trainer (so no GAE, value loss or whitening) and no DPPO, verl {verl} no preference
losses.

| what | peer | the peer's function | value | gradient | verdict |
|---|---|---|---|---|---|
"""


def number(x: float | None) -> str:
    return "—" if x is None else "0" if x == 0 else f"{x:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/peers_check.md")
    parser.add_argument("--only", default="", help="checks whose line contains this")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)

    from tests.peers import compare, trl_preference_rows, trl_rows, verl_policy_rows, verl_rows  # noqa: F401

    lines, failed = [], 0
    for check in compare.CHECKS:
        label = f"{check.what} | {check.peer} | {check.function}"
        if arguments.only not in label:
            continue
        found: list[list[float]] = []
        seen: list[tuple[torch.Tensor, ...]] = []
        plain: list[float] = []
        problem = ""
        try:
            for pair in compare.pairs(check):
                seen.append(pair.theirs)
                found.append([compare.difference(t, o) for t, o in zip(pair.theirs, pair.ours, strict=True)])
                plain += [compare.difference(t, o) for t, o in zip(pair.theirs, pair.plain, strict=False)]
        except Exception as error:
            if arguments.only:
                raise
            problem = f"{type(error).__name__}: {error}"
        largest = [max(column) for column in zip(*found, strict=True)]
        if problem:
            verdict = f"BROKEN: {problem}"
        elif len(torch.cat([t[0].flatten() for t in seen]).unique()) < 2 or not any(t[-1].any() for t in seen):
            verdict = "NOTHING COMPARED: the peer's value is always the same, or its gradient 0"
        elif not all(x <= compare.LIMIT for x in largest):
            verdict = "NOT EQUAL" + (f" after: {check.differs}" if check.differs else "")
        elif check.differs and max(plain) <= compare.LIMIT:
            verdict = f"NO DIFFERENCE where one is stated: {check.differs}"
        else:
            verdict = f"differs (as they are: {number(max(plain))}): {check.differs}" if check.differs else "equal"
        failed += verdict[0].isupper()
        columns = [*map(number, [*largest, None, None][:2])]
        lines.append(f"| {label} | {' | '.join(columns)} | {verdict} |")
        print(lines[-1], flush=True)
    print(f"{len(lines)} comparisons, {failed} failed")
    if arguments.write and not arguments.only and not failed:
        names = {name: version(name) for name in ("trl", "verl", "torch")}
        agreed = sum(line.endswith(" equal |") for line in lines)
        head = HEAD.format(
            **names,
            seeds=len(compare.SEEDS),
            limit=compare.LIMIT,
            agreed=agreed,
            all=len(lines),
            differing=len(lines) - agreed,
        )
        PAGE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
