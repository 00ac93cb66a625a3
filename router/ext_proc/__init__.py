"""The picker of endpoints for Envoy: its external processing over gRPC, as the Gateway API's pickers speak it.

Needs the extra `envoy`; nothing else of the router imports this package.
"""
