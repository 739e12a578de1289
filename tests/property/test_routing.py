"""Every request goes to the first of the serving replicas with the fewest, whatever came before."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.fleet import Fleet
from orchestrator.protocols import Engine
from orchestrator.tasks import settle
from orchestrator.testing import all_blocked, run
from orchestrator.types import (
    Completion,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Prompt,
)


class Desk:
    """An engine that only holds requests until they are ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[str, asyncio.Future[Completion]] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        self.held[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.held[request.request_id]
        finally:
            del self.held[request.request_id]

    def end(self, request_id: str) -> None:
        done = Completion(request_id, "", (), (), (), FinishReason.STOP)
        self.held[request_id].set_result(done)


WHAT = ("begin",) * 4 + ("end",) * 3 + ("fence", "admit", "lose", "add")
STEPS = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0)), min_size=10, max_size=60)


@settings(max_examples=300)
@given(st.integers(1, 4), STEPS)
def test_the_least_loaded_replica_gets_the_next_request(
    replicas: int, steps: list[tuple[str, int]]
) -> None:
    async def body() -> None:
        desks = [Desk(f"e{i}") for i in range(replicas)]
        fleet = Fleet(cast(list[Engine], desks))
        fleet.heals = True
        serving, tasks, made = list(desks), [], 0
        numbers = itertools.count()

        def replica(desk: Desk) -> Any:
            return fleet.named([desk.name])[0]

        for what, pick in steps:
            out = [d for d in desks if d not in serving]
            if what == "begin" and serving:
                expected = min(serving, key=lambda d: len(d.held))
                made += 1
                request = GenerationRequest(f"r{made}", Prompt((1,)), 4)
                tasks.append(asyncio.create_task(fleet.generate(request)))
                await all_blocked()
                assert request.request_id in expected.held
                assert len(fleet._by_load) <= 4 * len(desks) + 1, "it does not grow with requests"
            elif what == "end" and (held := [d for d in desks if d.held]):
                desk = held[pick % len(held)]
                desk.end(sorted(desk.held)[pick % len(desk.held)])
                await all_blocked()
            elif what == "fence" and serving:
                desk = serving.pop(pick % len(serving))
                fleet.fence([replica(desk)])
            elif what == "admit" and out:
                desk = out[pick % len(out)]
                replica(desk).applied = replica(desk).proved = fleet.version
                fleet.admit(replica(desk))
                serving = [d for d in desks if d in serving or d is desk]
            elif what == "lose" and len(serving) > 1:
                desk = serving.pop(pick % len(serving))
                desks.remove(desk)
                lost = replica(desk)
                fleet.lose(lost, "test")
                fleet.forget(lost)
                await all_blocked()  # its requests go on elsewhere
            elif what == "add":
                desk = Desk(f"new{next(numbers)}")
                desks.append(desk)
                fleet.add(cast(Engine, desk), cast(EngineInfo, None))
        assert fleet.version == PolicyVersion(0)
        await settle(tasks)

    run(body())
