"""Background work that one replica does for all: planning, and carrying tier actions out."""

from __future__ import annotations

from conductor.action_runner import ActionRunner
from conductor.actions import ExecutionError, TierAction
from conductor.cache_orders import CacheOrders
from conductor.shared_state.link import LinkError
from conductor.shared_state.sharing import SharedState
from conductor.tier_planning import TierPlanning


def follow_leader(
    shared: SharedState, actions: ActionRunner, planning: TierPlanning | None, orders: CacheOrders
) -> None:
    """From now on nothing is planned, ordered or carried out by a replica that does not lead.

    Every attempt is recorded in Redis under the leader's token first: one that was replaced while it stood still,
    and does not know, is refused there. Without Redis nobody leads, and background work rests.
    """

    async def permit(action: TierAction) -> None:
        try:
            refusal = await shared.record_action(
                {
                    "id": action.action_id,
                    "kind": str(action.kind),
                    "source": None if action.source is None else str(action.source),
                    "target": str(action.target),
                    "blocks": action.blocks,
                }
            )
        except LinkError as error:
            raise ExecutionError(f"it cannot be recorded: {error}", retryable=True) from None
        if refusal is not None:
            raise ExecutionError(refusal)

    def refusal() -> str | None:
        return None if shared.token else f"orders are for the leader; {shared.leader_words()}"

    actions.permit = permit
    orders.refusal = refusal
    if planning is not None:
        planning.leads = lambda: bool(shared.token)
