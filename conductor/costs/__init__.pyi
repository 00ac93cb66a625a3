from .calibration import Calibration, dump_calibrations, load_calibrations
from .instance_class import Codec, Floats, InstanceClass, Ints, Speed
from .tables import ClusterTables
from .topology import DEFAULT_LINKS, POOL_TIERS, Distance, PoolLink, Topology

__all__ = [
    "DEFAULT_LINKS",
    "POOL_TIERS",
    "Calibration",
    "ClusterTables",
    "Codec",
    "Distance",
    "Floats",
    "InstanceClass",
    "Ints",
    "PoolLink",
    "Speed",
    "Topology",
    "dump_calibrations",
    "load_calibrations",
]
