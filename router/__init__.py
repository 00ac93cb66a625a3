"""The OpenAI-compatible front door: requests are placed by a scheduler and spliced through to engines."""

from router.accounts import KeyLimits
from router.api_keys import ApiKey, KeyRing
from router.app import create_app
from router.cors import CorsPolicy
from router.disaggregation import PROTOCOLS, HandoffError, HandoffProtocol, PrefillAnswer, handoff_protocol
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
