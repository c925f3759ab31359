"""Tasks whose answer lies far back, after the definitions of RULER (arXiv 2404.06654).

Facts are hidden in long text and asked for at the end. Text is bytes; what facts are made of are
words of their own, a token each, so that no tokenizer and no reading of digits stands between a
model and the question whether it finds what is far away:

    0 … 255       bytes of the text
    256 … 271     marks: what begins a fact or a question, and what ends it
    272 … 655     words, three kinds of 128: names, values, places, drawn without order or meaning
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IGNORED = -100
FACT, ASSIGN, LIST, ASK, TRACE, COMMON, HOP, END = range(256, 264)
FIRST_WORD, OF_A_KIND, KINDS = 272, 128, 3
WORDS = OF_A_KIND * KINDS
VOCABULARY = FIRST_WORD + WORDS

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """Facts in the order in which they are hidden, and questions: (prompt, answer)."""

    facts: list[list[int]]
    questions: list[tuple[list[int], list[int]]]

    @property
    def tokens(self) -> int:
        """Of facts, questions and answers."""
        asked = sum(len(prompt) + len(answer) + 1 for prompt, answer in self.questions)
        return asked + sum(map(len, self.facts))


class Words:
    """Words without repetition, of one of the three kinds or of all."""

    def __init__(self, random: np.random.Generator, kind: int | None = None) -> None:
        drawn = random.permutation(WORDS if kind is None else OF_A_KIND)
        self._left = iter((FIRST_WORD + (kind or 0) * OF_A_KIND + drawn).tolist())

    def take(self, number: int) -> list[int]:
        return [next(self._left) for _ in range(number)]


def _needles(random: np.random.Generator, keys: int, values: int, asked: int) -> Problem:
    """``keys`` keys of ``values`` values each, of which ``asked`` keys are asked for.

    A value is two words, the first of which no other value has: names and values are told apart
    by the words they are made of, as RULER's are (words, and numbers of seven digits).
    """
    names, firsts = Words(random, 0).take(keys), Words(random, 1)
    answers: dict[int, list[int]] = {name: [] for name in names}
    facts = []
    for index in random.permutation(np.repeat(np.arange(keys), values)).tolist():
        second = FIRST_WORD + 2 * OF_A_KIND + int(random.integers(OF_A_KIND))
        value = [*firsts.take(1), second]
        answers[names[index]] += value
        facts.append([FACT, names[index], *value])
    drawn = [names[index] for index in random.permutation(keys)[:asked].tolist()]
    return Problem(facts, [([ASK, name], answers[name]) for name in drawn])


def _tracking(random: np.random.Generator, chains: int, hops: int) -> Problem:
    """Variables assigned from one another; asked for those that hold a chain's value."""
    words = Words(random)
    lines = [words.take(hops + 2) for _ in range(chains)]  # a value, then variables
    steps = random.permutation(np.repeat(np.arange(chains), hops + 1)).tolist()
    done = [0] * chains
    facts = []
    for line in steps:
        held, name = lines[line][done[line]], lines[line][done[line] + 1]
        done[line] += 1
        facts.append([ASSIGN, name, held])
    return Problem(facts, [([TRACE, lines[0][0]], lines[0][1:])])


def _common(
    random: np.random.Generator, common: int, often: int, others: int, seldom: int
) -> Problem:
    """A list of words, some of which come often: those, in ascending order."""
    words = Words(random)
    frequent, rare = words.take(common), words.take(others)
    listed = random.permutation(frequent * often + rare * seldom).tolist()
    facts = [[LIST, *listed[i : i + 8]] for i in range(0, len(listed), 8)]
    return Problem(facts, [([COMMON], sorted(frequent))])


def _two_facts(random: np.random.Generator, people: int) -> Problem:
    """Who is where, and what is there: what does one of them have?"""
    words = Words(random)
    who, where, what = (words.take(people) for _ in range(3))
    facts = [[FACT, *pair] for pair in zip(who, where, strict=True)]
    facts += [[FACT, *pair] for pair in zip(where, what, strict=True)]
    facts = [facts[index] for index in random.permutation(2 * people).tolist()]
    one = int(random.integers(people))
    return Problem(facts, [([HOP, who[one]], [where[one], what[one]])])


TASKS: dict[str, Callable[[np.random.Generator], Problem]] = {
    "needle": lambda random: _needles(random, keys=1, values=1, asked=1),
    "needle, 8 keys": lambda random: _needles(random, keys=8, values=1, asked=1),
    "needle, 4 values": lambda random: _needles(random, keys=1, values=4, asked=1),
    "needle, 4 queries": lambda random: _needles(random, keys=8, values=1, asked=4),
    "variable tracking": lambda random: _tracking(random, chains=2, hops=3),
    "common words": lambda random: _common(random, common=4, often=12, others=24, seldom=2),
    "two facts": lambda random: _two_facts(random, people=4),
}
NEEDLES = tuple(name for name in TASKS if name.startswith("needle"))


def many_needles(random: np.random.Generator, length: int, share: float) -> Problem:
    """For training: keys whose facts and questions take ``share`` of a sequence, all asked for."""
    keys = int(np.clip(share * length / 9, 1, OF_A_KIND))  # 4 tokens a fact, 5 a question
    return _needles(random, keys=keys, values=1, asked=keys)


def composed(
    problem: Problem, text: Tokens, length: int, random: np.random.Generator
) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    """Tokens [length] and which of them are answers.

    Facts lie at random places of the text, questions behind it:

        text fact text text fact … text question answer question answer
    """
    end, answers = [], []
    for prompt, answer in problem.questions:
        end += [*prompt, *answer, END]
        answers += [*(False for _ in prompt), *(True for _ in answer), False]
    room = length - problem.tokens
    if room < 0:
        raise ValueError(f"length: expected room for facts and questions, got {length} tokens")
    begin = int(random.integers(max(1, len(text) - room)))
    filler = text[begin : begin + room]
    places = np.sort(random.integers(room + 1, size=len(problem.facts))).tolist()
    parts: list[Sequence[int] | Tokens] = []
    before = 0
    for place, fact in zip(places, problem.facts, strict=True):
        parts += [filler[before:place], fact]
        before = place
    parts += [filler[before:], end]
    tokens = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    counted = np.zeros(length, dtype=bool)
    counted[length - len(end) :] = answers
    return tokens, counted
