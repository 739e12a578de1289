"""How far a rollout lags behind the policy, judged when it is consumed.

Staleness counts from the oldest token: a rollout cut by a swap is as stale as its first span.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.errors import StaleRollout
from orchestrator.types import PolicyVersion, Rollout


def staleness(rollout: Rollout, current: PolicyVersion) -> int:
    """Published versions between the oldest token of ``rollout`` and ``current`` (0: on-policy).

    A rollout without tokens lags by nothing. ValueError when it claims a version that is not
    published yet: labels and swaps then disagree.
    """
    if not rollout.completion.spans:
        return 0
    if rollout.max_version > current:
        raise ValueError(
            f"rollout {rollout.request.request_id} has tokens of version {rollout.max_version}, "
            f"but the newest published is {current}"
        )
    return current - rollout.min_version


def consume(rollout: Rollout, current: PolicyVersion, limit: int | None) -> Rollout:
    """``rollout`` with its staleness filled in; StaleRollout beyond ``limit``."""
    lag = staleness(rollout, current)
    if limit is not None and lag > limit:
        raise StaleRollout(lag, limit)
    return replace(rollout, staleness=lag)
