"""The OpenAI-compatible front door: requests are placed by a scheduler and spliced through to engines."""

from .app import create_app
from .disaggregation import PROTOCOLS, HandoffError, HandoffProtocol, PrefillAnswer, handoff_protocol
from .errors import RequestError
from .front_door import FrontDoorProtocol, front_door_protocol
from .metrics import RouterMetrics
from .prompt_tokenizer import PromptTokenizer
from .server import FrontDoorServer, serve
from .services import PlacementService, RouterServices
from .settings import RouterSettings
from .tokens import EngineTokenizer, TokenService

__all__ = [
    "PROTOCOLS",
    "EngineTokenizer",
    "FrontDoorProtocol",
    "FrontDoorServer",
    "HandoffError",
    "HandoffProtocol",
    "PlacementService",
    "PrefillAnswer",
    "PromptTokenizer",
    "RequestError",
    "RouterMetrics",
    "RouterServices",
    "RouterSettings",
    "TokenService",
    "create_app",
    "front_door_protocol",
    "handoff_protocol",
    "serve",
]
