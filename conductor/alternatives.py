"""Where else a placed request could go: what another data plane tries when the chosen instance does not answer."""

from __future__ import annotations

from conductor.explanation import PlacementRecord
from conductor.placement import Target


def alternatives(record: PlacementRecord, limit: int) -> list[Target]:
    """The next best instances for the leg that answers, best first, by the estimates of the decision.

    By TTFT where the instance prefills as well, else by the time between tokens.
    """
    estimates = record.candidates
    if estimates is None or limit < 1:
        return []
    role = estimates.roles.item(record.choice.decode)
    seconds = estimates.tbt_s if record.placement.disaggregated else estimates.ttft_s
    found = {record.placement.decode.instance_id: record.placement.decode}
    for i in seconds.argsort(kind="stable").tolist():
        target = estimates.ranks[i].target
        if target.instance_id not in found and estimates.roles.item(i) == role and estimates.fits.item(i):
            found[target.instance_id] = target
            if len(found) > limit:
                break
    return list(found.values())[1:]
