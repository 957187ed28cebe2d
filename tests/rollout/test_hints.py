"""What a teacher's prompt says beside the row's: which text, of whom, and where it stands."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from birl.errors import BirlError
from birl.rollout.assemble import samples
from birl.rollout.hints import Hints
from birl.types import Completion, Conversation, Group, Message, Outcome, Sample, Stop, Task, Trajectory, Turn
from tests.rollout.scripted import CHAT

QUESTION = (Message(role="system", content="Be brief."), Message(role="user", content="What is 3 + 4?"))
ANSWERS = ("five", "seven", "six", "7")
SCORES = (0.0, 1.0, 0.5, 1.0)


def group(prompt: Conversation = QUESTION, **columns: Any) -> Group:
    """Four answers, of which the second and the fourth are right."""
    asked = CHAT.render(prompt)
    told = []
    for n, (answer, score) in enumerate(zip(ANSWERS, SCORES, strict=True)):
        ids = (*CHAT.encode(answer), CHAT.end)
        said = Completion(tokens=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids), stop=Stop.STOP)
        extra = {"feedback": f"No. {n} is wrong."} if score < 1 else {}
        turns = (Turn(prompt=asked, completion=said),)
        told.append(Trajectory(turns=turns, reward=score, score=score, outcome=Outcome.OK, extra=extra))
    task = Task(id="rows.jsonl:3", prompt=prompt, answer="7", columns=columns)
    return Group(index=0, task=task, trajectories=tuple(told), start_version=0)


def hinted(group: Group, *texts: str, context: int = 10_000) -> list[Sample]:
    hints = Hints(texts=texts, chat=CHAT, context=context)
    plain = [samples(t, 0.0, 0, i)[0] for i, t in enumerate(group.trajectories)]
    return [hints.of(sample, group, i) for i, sample in enumerate(plain)]


def prompts(found: list[Sample]) -> list[str | None]:
    return [None if s.hinted is None else CHAT.decode(s.hinted.tolist()) for s in found]


def behind(hint: str) -> str:
    return CHAT.text((QUESTION[0], replace(QUESTION[1], content=f"What is 3 + 4?\n\n{hint}")))


def test_a_column_stands_behind_the_question() -> None:
    found = prompts(hinted(group(proof="3 + 4 = 7"), "{proof}, so {answer}. JSON: {}"))
    assert found == [behind("3 + 4 = 7, so 7. JSON: {}")] * 4


def test_text_stands_behind_the_hint() -> None:
    assert prompts(hinted(group("3+4="), "It is {answer}."))[0] == CHAT.text("It is 7.\n\n3+4=")


def test_a_sibling_is_the_first_right_answer_and_never_ones_own() -> None:
    assert prompts(hinted(group(), "{sibling}!")) == [behind(f"{s}!") for s in ("seven", "7", "seven", "seven")]
    alone = group()
    alone = replace(
        alone, trajectories=(*alone.trajectories[:2], *(replace(t, score=0.0) for t in alone.trajectories[2:]))
    )
    assert prompts(hinted(alone, "{sibling}!")) == [behind("seven!"), None, behind("seven!"), behind("seven!")]


def test_the_first_text_of_which_everything_is_there() -> None:
    found = prompts(hinted(group(note=""), "{note} {answer}", "{feedback}"))
    assert found == [behind("No. 0 is wrong."), None, behind("No. 2 is wrong."), None]


@pytest.mark.parametrize(("column", "said"), [("3 + 4 = 7\n#### 7", "3 + 4 = 7\n#### 7"), ("8, as a pupil said", "7")])
def test_the_answer_is_that_of_its_column(column: str, said: str) -> None:
    """Whole where the column `answer` is data.answer_column; another column of that name was shown as right."""
    assert prompts(hinted(group(answer=column), "{answer}"))[0] == behind(said)


def test_what_follows_the_first_prompt_stays() -> None:
    """Of a conversation of two turns."""
    one, talk = group().trajectories[0], group()
    before = (*one.turns[0].prompt.tolist(), *one.turns[0].completion.ids)
    more = CHAT.extend(
        before[: len(one.turns[0].prompt)], one.turns[0].completion.ids, (Message(role="user", content="Sure?"),)
    )
    second = Turn(prompt=more, completion=one.turns[0].completion)
    talk = replace(talk, trajectories=(replace(one, turns=(one.turns[0], second)), *talk.trajectories[1:]))
    (found, *_), hints = hinted(talk, "{answer}"), Hints(texts=["{answer}"], chat=CHAT, context=1)
    assert prompts([found]) == [behind("7")]
    assert len(found.tokens) == len(more) + len(second.completion.tokens)
    assert hints.of(replace(found, hinted=None), talk, 0).hinted is None  # no room


def test_a_hint_stands_behind_the_question_after_a_description_of_tools() -> None:
    """Tools are no part of the row; of an answer all turns are shown."""
    row, tools = (QUESTION[1],), Message(role="system", content="Call calculator(expression).")
    asked = CHAT.render((tools, *row))
    episodes = []
    for t in group(row).trajectories:
        answer = t.turns[0].completion
        more = CHAT.extend(asked, answer.ids, (Message(role="tool", content="= 7"),))
        turns = (
            Turn(prompt=np.array(asked, np.int32), completion=answer),
            Turn(prompt=np.array(more, np.int32), completion=answer),
        )
        episodes.append(replace(t, turns=turns))
    talk = replace(group(row), trajectories=tuple(episodes))
    shown = [CHAT.text((tools, replace(row[0], content=f"What is 3 + 4?\n\n{s}\n{s}!"))) for s in ("seven", "7")]
    assert prompts(hinted(talk, "{sibling}!")) == [shown[0], shown[1], shown[0], shown[0]]


def test_names_that_are_no_columns_and_other_conversations_are_refused() -> None:
    with pytest.raises(BirlError, match=r"rows\.jsonl, row 4 has no column 'proof', only answer, note"):
        hinted(group(note="x"), "{proof}")
    other = group()
    turn = replace(other.trajectories[0].turns[0], prompt=np.array(CHAT.render("else"), np.int32))
    other = replace(other, trajectories=(replace(other.trajectories[0], turns=(turn,)),))
    with pytest.raises(BirlError, match=r"rows\.jsonl, row 4 does not begin with the row's prompt"):
        hinted(other, "{answer}")
