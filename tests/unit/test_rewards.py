"""Rewards are numbers that can be worked out by hand."""

from __future__ import annotations

import pytest

from actors.prompts import BUILTIN_PROMPTS
from actors.rewards import (
    DEFAULT_REWARD,
    REWARDS,
    alliteration,
    answer,
    check_reward,
    default_reward,
    get_reward,
    sevens,
)
from orchestrator.errors import ConfigError
from orchestrator.types import Prompt


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("", 0.0),
        ("   ", 0.0),
        ("Sharks sense small signals", 1.0),
        ("the Sun, (seas) rise", 0.5),
        ("sun sun sun sun", 0.25),
        ("so is", 0.0),
        ("sss strr sun1 sssun", 0.0),
        ("the gas is air", 0.0),
    ],
)
def test_alliteration_counts_distinct_words_that_begin_with_s(text: str, reward: float) -> None:
    assert alliteration("any", text) == reward


def test_answer_wants_the_whole_word() -> None:
    assert answer("The capital of Italy is", " rome. It is old") == 1.0
    assert answer("The capital of Italy is", " Romeo") == 0.0
    assert answer("Who?", " Rome") == 0.0


@pytest.mark.parametrize("name", sorted(REWARDS))
@pytest.mark.parametrize("text", ["", "\ufffd\x00", "a " * 50, "Saturn sees six suns"])
def test_every_reward_stays_within_zero_and_one(name: str, text: str) -> None:
    assert 0.0 <= get_reward(name)(BUILTIN_PROMPTS[2], text) <= 1.0


def test_a_random_model_is_paid_for_what_it_can_write() -> None:
    assert default_reward("random:qwen3-0.6b") == "sevens"
    assert default_reward("tiny") == default_reward("org/random:name") == DEFAULT_REWARD
    assert sevens("any", "<1707><23>a") == pytest.approx(2 / 6)
    assert sevens("any", "no digits") == 0.0


def test_an_unknown_reward_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown reward 'best'.*alliteration, answer, sevens"):
        get_reward("best")


def test_a_reward_that_cannot_judge_the_prompts_is_refused() -> None:
    known = [Prompt((1,), text) for text in BUILTIN_PROMPTS]
    own = [*known, Prompt((1,), "Once upon a time")]
    check_reward("answer", known)
    check_reward(DEFAULT_REWARD, own)
    with pytest.raises(ConfigError, match="no answer to 'Once upon a time'"):
        check_reward("answer", own)
