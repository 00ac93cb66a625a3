"""Conductor: the scheduler. Cluster state, cost model, placement policies, explanation, REST API.

Modules are imported by name; this file stays empty of them so that `conductor.placement`, all that the router
needs, loads without the compiled index.
"""

__version__ = "0.1.0"
