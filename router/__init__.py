"""The OpenAI-compatible front door: requests are placed by a scheduler and spliced through to engines.

Names are loaded when they are asked for: a router worker starts without what only the conductor needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.accounts import KeyLimits
    from router.api_keys import ApiKey, KeyRing
    from router.app import create_app
    from router.cors import CorsPolicy
    from router.disaggregation import (
        PROTOCOLS,
        HandoffError,
        HandoffProtocol,
        PrefillAnswer,
        handoff_protocol,
    )
    from router.errors import RequestError
    from router.front_door import FrontDoorProtocol, front_door_protocol
    from router.metrics import RouterMetrics
    from router.prompt_tokenizer import PromptTokenizer
    from router.server import FrontDoorServer, serve
    from router.services import PlacementService, RouterServices
    from router.settings import RouterSettings
    from router.tls import ServerTls, TlsError, engine_tls
    from router.tokens import EngineTokenizer, TokenService

__all__ = [
    "PROTOCOLS",
    "ApiKey",
    "CorsPolicy",
    "EngineTokenizer",
    "FrontDoorProtocol",
    "FrontDoorServer",
    "HandoffError",
    "HandoffProtocol",
    "KeyLimits",
    "KeyRing",
    "PlacementService",
    "PrefillAnswer",
    "PromptTokenizer",
    "RequestError",
    "RouterMetrics",
    "RouterServices",
    "RouterSettings",
    "ServerTls",
    "TlsError",
    "TokenService",
    "create_app",
    "engine_tls",
    "front_door_protocol",
    "handoff_protocol",
    "serve",
]

_MODULES = {
    "accounts": ("KeyLimits",),
    "api_keys": ("ApiKey", "KeyRing"),
    "app": ("create_app",),
    "cors": ("CorsPolicy",),
    "disaggregation": (
        "PROTOCOLS",
        "HandoffError",
        "HandoffProtocol",
        "PrefillAnswer",
        "handoff_protocol",
    ),
    "errors": ("RequestError",),
    "front_door": ("FrontDoorProtocol", "front_door_protocol"),
    "metrics": ("RouterMetrics",),
    "prompt_tokenizer": ("PromptTokenizer",),
    "server": ("FrontDoorServer", "serve"),
    "services": ("PlacementService", "RouterServices"),
    "settings": ("RouterSettings",),
    "tls": ("ServerTls", "TlsError", "engine_tls"),
    "tokens": ("EngineTokenizer", "TokenService"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"router.{module}"), name)
    return value
