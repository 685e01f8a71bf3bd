"""One rank of an expert group, a process of `test_expert_processes.py`."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from services.engine.model.exchange import join_group
from services.engine.model.network import load_network
from services.engine.model.presets import NANO
from services.engine.model.tests.kit import INVARIANT, Driver, PredictableSource, prompt
from services.lb.expert.client import PlanInput, plan_locally


def main(rank: int, num_ranks: int, store: str, plan: dict) -> None:
    exchange = join_group(store, rank, num_ranks, timeout_s=60.0)
    net = load_network(
        NANO, PredictableSource(NANO, 1), INVARIANT, extra_experts=2, exchange=exchange
    )
    own = plan[str(rank)]
    if own.get("dies"):
        print(json.dumps({}), flush=True)
        os._exit(0)
    driver = Driver(net)
    told: dict = {"slots_before": driver.runner.expert_slots}
    if own.get("then_lost"):
        try:
            driver.generate(prompt(20), 4)
        except Exception as error:
            told["lost"] = str(error)
        print(json.dumps(told), flush=True)
        os._exit(0)
    told["said"] = []
    for at, num in enumerate(own["prompts"]):
        ids = prompt(num, 10 * rank + at)
        said = [driver.start(at + 1, ids)]
        if own.get("move") and at == 0:
            told["loads"] = asyncio.run(rebalance(driver))
        while len(said) < own["tokens"]:
            said += [token.token_id for token in driver.step([at + 1])[at + 1].tokens]
        told["said"].append(said[: own["tokens"]])
    driver.runner.shut_down()
    told["slots"] = driver.runner.expert_slots
    told["slots_held"] = len(net.experts.shard.weights["layers.0"][0])
    told["moved"] = driver.runner._worker.num_placements
    print(json.dumps(told), flush=True)
    os._exit(0)  # like the ends above: how the interpreter takes torch's threads down is not tested


async def rebalance(driver: Driver) -> list:
    """Plans with the expert balancer's own function and applies it, as an engine's leader does."""
    loads = await driver.runner.expert_loads()
    slots = driver.runner.expert_slots
    given = PlanInput(loads[None].astype("uint32"), len(slots[0]), 2, current=slots, min_gain=-9.0)
    await driver.runner.place_experts(plan_locally(given).slots)
    return loads.tolist()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
