"""Which control calls may be made again when one failed, and how a late answer is told.

Every call carries an operation (``orchestrator.context``): run, sync id, step, version, state. The
sync id is new for each try, so what an engine does for a try that was given up is refused in the
next one. Every call is made under the deadline of its phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Retry(StrEnum):
    """When a call that failed may be repeated as it is."""

    SAFE = "safe"
    """At any time: a second one changes nothing."""
    BEFORE_BYTES = "before_bytes"
    """As long as nothing was applied: the try is made again from its beginning."""
    NEVER = "never"
    """Not as it is: what it left is unknown, and only a whole new update heals it."""


RETRY: Mapping[str, Retry] = {
    # engines
    "start": Retry.NEVER,
    "generate": Retry.NEVER,
    "wait_for_tokens": Retry.SAFE,
    "open_channel": Retry.BEFORE_BYTES,
    "close_channel": Retry.SAFE,
    "prefetch": Retry.BEFORE_BYTES,
    "pause": Retry.SAFE,
    "start_update": Retry.BEFORE_BYTES,
    "receive_update": Retry.NEVER,
    "finish_update": Retry.NEVER,
    "resume": Retry.SAFE,
    "swap": Retry.NEVER,
    "wait_first_tokens": Retry.SAFE,
    "digests": Retry.SAFE,
    "prompt_logprobs": Retry.SAFE,
    "status": Retry.SAFE,
    "abort_requests": Retry.SAFE,
    "wait_dead": Retry.SAFE,
    "aclose": Retry.SAFE,
    # the trainer, beyond these
    "listen": Retry.BEFORE_BYTES,
    "stage": Retry.BEFORE_BYTES,
    "send": Retry.NEVER,
    "train": Retry.NEVER,
    "reference_logprobs": Retry.SAFE,
    "save_checkpoint": Retry.SAFE,
    "save_state": Retry.SAFE,
    "load_state": Retry.SAFE,
}
"""By method of the protocols."""
