"""The web console: a page that shows the cluster live, from the REST API of the server that it came from."""

from conductor.console.pages import make_console_routes

__all__ = ["make_console_routes"]
