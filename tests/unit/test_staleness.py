"""How stale a rollout is when it is consumed."""

from __future__ import annotations

import pytest

from orchestrator.errors import StaleRollout
from orchestrator.staleness import consume, staleness
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Prompt,
    Rollout,
    TokenSpan,
)


def rollout(*spans: tuple[int, int, int]) -> Rollout:
    """A rollout with spans ``(version, start, end)``."""
    length = spans[-1][2] if spans else 0
    return Rollout(
        GenerationRequest("r", Prompt((1, 2)), 16),
        Completion(
            "r",
            "engine-0",
            tuple(range(length)),
            (0.0,) * length,
            tuple(TokenSpan(PolicyVersion(v), a, b) for v, a, b in spans),
            FinishReason.LENGTH,
        ),
    )


@pytest.mark.parametrize(("made", "used", "lag"), [(3, 5, 2), (3, 3, 0), (0, 1, 1)])
def test_staleness_counts_versions_from_making_to_using(made: int, used: int, lag: int) -> None:
    assert staleness(rollout((made, 0, 4)), PolicyVersion(used)) == lag


def test_limit_two_takes_a_lag_of_two_and_limit_one_refuses_it() -> None:
    made_at_3 = rollout((3, 0, 4))
    taken = consume(made_at_3, PolicyVersion(5), 2)
    assert taken.staleness == 2
    assert made_at_3.staleness is None
    with pytest.raises(StaleRollout, match="2 versions old, the limit is 1") as caught:
        consume(made_at_3, PolicyVersion(5), 1)
    assert (caught.value.staleness, caught.value.limit) == (2, 1)


def test_without_a_limit_any_age_is_taken() -> None:
    assert consume(rollout((0, 0, 1)), PolicyVersion(99), None).staleness == 99


def test_limit_zero_takes_only_the_current_policy() -> None:
    assert consume(rollout((4, 0, 2)), PolicyVersion(4), 0).staleness == 0
    with pytest.raises(StaleRollout):
        consume(rollout((3, 0, 2), (4, 2, 4)), PolicyVersion(4), 0)


def test_a_cut_rollout_is_as_stale_as_its_oldest_token() -> None:
    cut = rollout((0, 0, 5), (1, 5, 9), (2, 9, 12))
    assert (cut.cut, cut.min_version, cut.max_version) == (True, 0, 2)
    assert staleness(cut, PolicyVersion(2)) == 2


def test_a_rollout_without_tokens_lags_by_nothing() -> None:
    assert consume(rollout(), PolicyVersion(7), 0).staleness == 0


def test_tokens_of_a_version_that_is_not_published_are_an_error_not_fresh() -> None:
    with pytest.raises(ValueError, match=r"version 6.*newest published is 5") as caught:
        consume(rollout((5, 0, 2), (6, 2, 3)), PolicyVersion(5), None)
    assert not isinstance(caught.value, StaleRollout)
