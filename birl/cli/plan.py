"""`birl plan`: the memory of a training, --simulate and --cluster."""

from birl.errors import BirlError


def run(words: list[str]) -> int:
    """Raises `BirlError`."""
    if any(word.partition("=")[0] in ("--simulate", "--measured") for word in words):
        return _simulate(words)
    if "--cluster" in words:
        return _cluster(words)
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--memory=") else [word])]
    available = None
    if "--memory" in words:
        place = words.index("--memory")
        try:
            available = float("".join(words[place + 1 : place + 2]))
        except ValueError:
            raise BirlError("--memory takes a number of GiB, as in `birl plan --memory 16`") from None
        words = words[:place] + words[place + 2 :]
    as_json, words = "--json" in words, [word for word in words if word != "--json"]
    if unknown := [word for word in words if word.startswith("--") and "=" not in word]:
        raise BirlError(f"{unknown[0]}: `birl plan` has --memory GIB, --json, --simulate and --cluster")
    from birl.loops import plan

    plan.run(words, as_json=as_json, available=available)
    return 0


def _simulate(words: list[str]) -> int:
    from birl.simulation import command

    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    measured = ""
    if "--measured" in words:
        place = words.index("--measured")
        measured = "".join(words[place + 1 : place + 2])
        if not measured or measured.startswith("--"):
            raise BirlError("--measured takes a file, as in `birl plan --simulate --measured async.json`")
        words = words[:place] + words[place + 2 :]
    as_json, words = "--json" in words, [word for word in words if word not in ("--json", "--simulate")]
    unknown = [word for word in words if word.startswith("--")]
    if unknown:
        raise BirlError(f"{unknown[0]}: `birl plan --simulate` has --measured FILE and --json")
    command.run(words, measured=measured, as_json=as_json)
    return 0


def _cluster(words: list[str]) -> int:
    from birl.planning import command

    words = [word for word in words if word != "--cluster"]
    as_json, words = "--json" in words, [word for word in words if word != "--json"]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise BirlError(f"{unknown[0]}: `birl plan --cluster` has --json")
    command.run(words, as_json=as_json)
    return 0
