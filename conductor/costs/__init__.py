"""The cost model: every estimate of the scheduler, in seconds, comes from here."""

from conductor.costs.calibration import Calibration, dump_calibrations, load_calibrations
from conductor.costs.exposure import Exposure
from conductor.costs.instance_class import Floats, InstanceClass, Ints, Speed
from conductor.costs.tables import ClusterTables
from conductor.costs.topology import DEFAULT_LINKS, Distance, Topology

__all__ = [
    "DEFAULT_LINKS",
    "Calibration",
    "ClusterTables",
    "Distance",
    "Exposure",
    "Floats",
    "InstanceClass",
    "Ints",
    "Speed",
    "Topology",
    "dump_calibrations",
    "load_calibrations",
]
