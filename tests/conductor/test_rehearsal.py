"""After a rehearsal no decision waits for the compiler."""

import subprocess
import sys

_PROGRAM = """
import sys
sys.path.insert(0, "tests/support")
from conductor.rehearsal import rehearse
rehearse()
from conductor.admission import forecast_kernel
from conductor.costs import kernels
from conductor.policies import slo_kernel
compiled = [
    kernel
    for module in (kernels, slo_kernel, forecast_kernel)
    for kernel in vars(module).values()
    if hasattr(kernel, "signatures")
]
before = [len(kernel.signatures) for kernel in compiled]
from cluster_factory import hold, make_scheduler, request
from conductor.placement import Usage
scheduler = make_scheduler("ppdm")
hold(scheduler, "p0", request(2048).tokens)
for seed in (0, 0, 1):
    placement = scheduler.place(request(2048, seed=seed), 0.0)
    scheduler.finished(placement.placement_id, 1.0, Usage(2048, 9, 0))
assert any(before), "nothing was compiled"
assert before == [len(kernel.signatures) for kernel in compiled], "a placement compiled something"
"""


def test_a_placement_after_a_rehearsal_compiles_nothing() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)
