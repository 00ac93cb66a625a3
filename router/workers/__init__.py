"""Several router processes over one conductor: how they ask it for placements, and what it tells them.

Modules are imported by name; a worker needs only its own end.
"""
