"""Groups come back whole, whatever becomes of their rollouts, from a real gateway."""

from pathlib import Path

from harnessrl.cli.services import gateway_service
from harnessrl.client import AsyncClient, delete_rollout, get_rollout, patch_rollout
from harnessrl.config import AgentConfig, Config
from harnessrl.schemas import StatusPatch
from harnessrl.trainer.collect import CollectedGroup, Collector


async def test_a_deleted_rollout_is_one_that_the_infrastructure_lost(tmp_path: Path) -> None:
    with gateway_service(Config(), tmp_path, "key") as served:
        async with AsyncClient(served.address, "key") as gateway, Collector(gateway, AgentConfig()) as collector:
            group = CollectedGroup("g", {"question": "1+1"}, 2, 0)
            await collector.start([group])
            ended, deleted = group.rollout_ids
            await gateway(patch_rollout(ended, StatusPatch(state="failed", error_message="ended")))
            await gateway(delete_rollout(deleted))
            assert await collector.changed(20)
            assert group.complete
            assert [r.error_message for r in group.rollouts] == ["ended", "the rollout was deleted"]
            assert group.rollouts[1].failure_kind == "infra"


async def test_a_cancelled_group_leaves_nothing_behind(tmp_path: Path) -> None:
    with gateway_service(Config(), tmp_path, "key") as served:
        async with AsyncClient(served.address, "key") as gateway, Collector(gateway, AgentConfig()) as collector:
            cancelled, other = CollectedGroup("a", {}, 2, 0), CollectedGroup("b", {}, 1, 0)
            await collector.start([cancelled, other])
            assert (await collector.cancel("a")) is cancelled and not cancelled.rollouts
            await gateway(patch_rollout(other.rollout_ids[0], StatusPatch(state="failed", error_message="ended")))
            assert await collector.changed(20) and other.complete
            assert (await gateway(get_rollout(other.rollout_ids[0]))).rollout.status.state == "failed"
