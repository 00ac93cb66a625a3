"""``python mooncake_node.py MASTER HOST:PORT KEY...``: a node of a Mooncake store that holds objects of one KiB.

Run with the interpreter that has the store's library. Says ``ready`` and stays until its input ends.
"""

import sys

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

master, address, *keys = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup(address, "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master) == 0
config = ReplicateConfig()
config.preferred_segment = address
for key in keys:
    assert store.put(key, bytes(1024), config) == 0, key
print("ready", flush=True)
sys.stdin.read()
store.close()
