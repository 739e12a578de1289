"""Verifiable rewards: functions of the text alone, by name. Standard library only.

A reward takes the prompt's text and the rollout's text and returns a number in [0, 1].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from actors.prompts import FACTS
from orchestrator.errors import ConfigError
from orchestrator.types import Prompt

Reward = Callable[[str, str], float]
"""``(prompt text, rollout text) -> reward``."""

DEFAULT_REWARD = "alliteration"

_TRIM = ".,;:!?\"'()"
_VOWEL = re.compile("[aeiouy]")
_THRICE = re.compile(r"(.)\1\1")


def alliteration(prompt: str, text: str) -> float:
    """Share of the words that begin with *s*, each distinct one counted once.

    A word is what stands between blanks, without punctuation around it. Only those of three
    letters or more, with a vowel and no letter three times in a row, count as hits, so
    neither repeating a word nor hissing pays.
    """
    words = [word.strip(_TRIM).lower() for word in text.split()]
    hits = {
        word
        for word in words
        if len(word) >= 3
        and word.startswith("s")
        and word.isalpha()
        and _VOWEL.search(word)
        and not _THRICE.search(word)
    }
    return len(hits) / max(1, len(words))


def answer(prompt: str, text: str) -> float:
    """1 when the text has the answer to a built-in prompt as a whole word, else 0."""
    word = dict(FACTS).get(prompt)
    return float(word is not None and re.search(rf"\b{word}\b", text, re.IGNORECASE) is not None)


def sevens(prompt: str, text: str) -> float:
    """Share of the digits that are 7: for ``random:`` models, whose text is numbers of tokens."""
    digits = [character for character in text if character.isdecimal()]
    return digits.count("7") / max(1, len(digits))


REWARDS: Mapping[str, Reward] = {
    DEFAULT_REWARD: alliteration,
    "answer": answer,
    "sevens": sevens,
}


def default_reward(model: str) -> str:
    """The reward when none is chosen: one that ``model`` gets something of."""
    return "sevens" if model.startswith("random:") else DEFAULT_REWARD


def get_reward(name: str) -> Reward:
    """The reward called ``name`` (ConfigError when there is none)."""
    try:
        return REWARDS[name]
    except KeyError:
        known = ", ".join(sorted(REWARDS))
        raise ConfigError(f"unknown reward {name!r}: choose one of {known}") from None


def check_reward(name: str, prompts: Sequence[Prompt]) -> None:
    """ConfigError when ``name`` is unknown or cannot judge one of ``prompts``."""
    if get_reward(name) is not answer:
        return
    for prompt in prompts:
        if prompt.text not in dict(FACTS):
            raise ConfigError(
                f"reward 'answer' knows no answer to {prompt.text[:60]!r}: it judges the "
                f"built-in prompts only; use reward {DEFAULT_REWARD!r} for a prompts file"
            )
