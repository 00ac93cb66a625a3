"""State that several conductors share in Redis: instances, load, what was learned, and who leads.

See docs/high_availability.md.
"""

from conductor.shared_state.joining import Joined, join
from conductor.shared_state.lease import Lease
from conductor.shared_state.link import LinkError, RedisLink, host_of
from conductor.shared_state.members import SharedMembers
from conductor.shared_state.metrics import SharedStateCollector
from conductor.shared_state.replicas import Replica, new_id, reachable_url
from conductor.shared_state.rest import make_shared_state_router
from conductor.shared_state.sharing import SharedState

__all__ = [
    "Joined",
    "Lease",
    "LinkError",
    "RedisLink",
    "Replica",
    "SharedMembers",
    "SharedState",
    "SharedStateCollector",
    "host_of",
    "join",
    "make_shared_state_router",
    "new_id",
    "reachable_url",
]
