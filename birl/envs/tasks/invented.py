"""A small invented country: towns, people, works and museums, in passages of two or three sentences, and questions that
need several of them. Generated from a seed; no name is real, so nothing is known from pre-training.

    passages()    about 150 of {"title", "text"}
    questions()   rows of {"prompt", "answer", "searches"}: the look-ups, one after the other
"""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

SEED = 7


def words(text: str) -> list[str]:
    return text.split()


STARTS = words("bra dro fel gar hul jor kel lum mar nov oss pel quo rin sar tor ulv vek wen yal zor bel cas dun")
MIDDLES = words("ba de fo gi lo ma ne ri sa to vi")
TOWN_ENDS = words("holm wick mar stad ford by thal")
PERSON_ENDS = words("ric na lis don mira vek")
RIVER_ENDS = words("e a is une")
PROVINCES = ("Nordvale", "Eastmere", "Sundrach", "Weldmark", "Oskarra")
GOODS = (
    "glass bells",
    "salted plums",
    "blue paper",
    "walking sticks",
    "honey bread",
    "clay pipes",
    "wool hats",
    "lamps",
)
JOBS = ("engineer", "painter", "composer", "botanist", "printer", "astronomer")
KINDS = {
    "engineer": ("machine", "invented"), "painter": ("painting", "painted"), "composer": ("opera", "composed"),
    "botanist": ("herbal", "wrote"), "printer": ("atlas", "printed"), "astronomer": ("star chart", "drew"),
}  # fmt: skip
ADJECTIVES = words("silver silent crooked golden hidden seventh broken winter patient hollow scarlet twin")
THINGS = words("heron lantern orchard compass staircase meadow anvil harbour mirror thistle clock well")


@dataclass(frozen=True, kw_only=True)
class Town:
    name: str
    river: str
    province: str
    founded: int
    goods: str


@dataclass(frozen=True, kw_only=True)
class Person:
    name: str
    born_in: Town
    year: int
    job: str
    teacher: str


@dataclass(frozen=True, kw_only=True)
class Museum:
    name: str
    town: Town
    opened: int


@dataclass(frozen=True, kw_only=True)
class Artwork:
    name: str
    kind: str
    verb: str
    maker: Person
    year: int
    museum: Museum


@dataclass(frozen=True, kw_only=True)
class Country:
    towns: tuple[Town, ...]
    people: tuple[Person, ...]
    museums: tuple[Museum, ...]
    works: tuple[Artwork, ...]


class Names:
    """Invented words, all different."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.used = rng, set[str]()

    def new(self, ends: list[str]) -> str:
        while True:
            word = self.rng.choice(STARTS) + self.rng.choice([*MIDDLES, ""]) + self.rng.choice(ends)
            if word not in self.used:
                self.used.add(word)
                return word.capitalize()


@cache
def country() -> Country:
    rng = random.Random(SEED)
    names = Names(rng)
    rivers = [names.new(RIVER_ENDS) for _ in range(20)]
    towns = tuple(
        Town(name=names.new(TOWN_ENDS), river=rng.choice(rivers), province=rng.choice(PROVINCES),
             founded=rng.randint(1100, 1590), goods=rng.choice(GOODS))
        for _ in range(40)
    )  # fmt: skip
    called = [f"{names.new(PERSON_ENDS)} {names.new(PERSON_ENDS)}" for _ in range(45)]
    people = tuple(
        Person(name=name, born_in=rng.choice(towns), year=rng.randint(1600, 1850), job=rng.choice(JOBS),
               teacher=called[(i + rng.randint(1, 44)) % 45])
        for i, name in enumerate(called)
    )  # fmt: skip
    museums = tuple(
        Museum(name=f"{names.new(PERSON_ENDS)} Museum", town=town, opened=rng.randint(1900, 1990))
        for town in rng.sample(towns, 15)
    )
    titles = rng.sample([f"The {a.capitalize()} {t.capitalize()}" for a in ADJECTIVES for t in THINGS], 50)
    works = []
    for title in titles:
        maker = rng.choice(people)
        kind, verb = KINDS[maker.job]
        year = maker.year + rng.randint(20, 60)
        works.append(Artwork(name=title, kind=kind, verb=verb, maker=maker, year=year, museum=rng.choice(museums)))
    return Country(towns=towns, people=people, museums=museums, works=tuple(works))


def passages() -> list[dict[str, str]]:
    """One passage for each town, person, museum and work."""
    land = country()
    result = [
        (t.name, f"{t.name} is a town on the river {t.river} in the province of {t.province}. It was founded in "
                 f"{t.founded} and is known for its {t.goods}.")
        for t in land.towns
    ]  # fmt: skip
    result += [
        (p.name, f"{p.name} was {article(p.job)} {p.job}, born in {p.year} in {p.born_in.name}, and learned the trade "
                 f"from {p.teacher}.")
        for p in land.people
    ]  # fmt: skip
    result += [
        (m.name, f"The {m.name} stands in {m.town.name}. It opened its doors in {m.opened}.") for m in land.museums
    ]
    result += [
        (w.name, f"{w.name} is {article(w.kind)} {w.kind} that {w.maker.name} {w.verb} in {w.year}. It is kept in the "
                 f"{w.museum.name}.")
        for w in land.works
    ]  # fmt: skip
    return [{"title": title, "text": text} for title, text in result]


def questions() -> list[dict[str, Any]]:
    """All questions, in a fixed order. Each needs two to four passages."""
    result: list[tuple[str, str, list[str]]] = []
    for w in country().works:
        who, town, museum = w.maker, w.maker.born_in, w.museum
        result += [
            (f"In which town was the maker of the {w.kind} {w.name} born?", town.name, [w.name, who.name]),
            (f"Who taught the maker of the {w.kind} {w.name}?", who.teacher, [w.name, who.name]),
            (f"In which town can the {w.kind} {w.name} be seen?", museum.town.name, [w.name, museum.name]),
            (f"On which river lies the town where the {w.kind} {w.name} is kept?", museum.town.river,
             [w.name, museum.name, museum.town.name]),
            (f"In what year was the town founded in which the maker of the {w.kind} {w.name} was born?",
             str(town.founded), [w.name, who.name, town.name]),
        ]  # fmt: skip
    for p in country().people:
        result += [
            (f"On which river was {p.name} born?", p.born_in.river, [p.name, p.born_in.name]),
            (f"In which province was {p.name} born?", p.born_in.province, [p.name, p.born_in.name]),
        ]
    return [{"prompt": q, "answer": a, "searches": s, "data_source": "search"} for q, a, s in result]


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
