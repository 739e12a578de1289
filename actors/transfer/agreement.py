"""That both sides of a channel mean the same tensors, cut the same way: checked, not assumed.

The manifest reaches a worker through the engine's RPCs; what the sender itself will send is
published on the channel's store, and the worker compares the two before it is ready.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from orchestrator.errors import ChannelError

from .layout import Layout, differences, fingerprint, manifest_from_wire, manifest_to_wire
from .rendezvous import Rendezvous


def offer(meeting: Rendezvous, layout: Layout, bucket_bytes: int) -> None:
    """The sender's part: publish what it will send, and in buckets of which size."""
    rows = manifest_to_wire([slot.spec for slot in layout.slots])
    meeting.put("manifest", json.dumps(rows))
    meeting.put("fingerprint", fingerprint(layout, bucket_bytes))


def check(
    meeting: Rendezvous, layout: Layout, bucket_bytes: int, extra: Mapping[str, object]
) -> None:
    """A worker's part. ChannelError names the bucket sizes or the tensors that differ."""
    announced = extra.get("bucket_bytes")
    if announced != bucket_bytes:
        raise ChannelError(
            f"the sender uses buckets of {announced} bytes, this worker of {bucket_bytes}: "
            "give both sides one size"
        )
    if meeting.read("fingerprint") == fingerprint(layout, bucket_bytes):
        return
    sent = manifest_from_wire(json.loads(meeting.read("manifest")))
    unlike = differences(sent, [slot.spec for slot in layout.slots])
    raise ChannelError(
        f"the sender's tensors are not those that this worker was told of: {unlike}"
        if unlike
        else "the two sides cut the same tensors differently: they run different versions of this "
        "package"
    )
