"""The names that the package offers."""

import subprocess
import sys

import router


def test_exported_names() -> None:
    assert set(router.__all__) == {
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
    }
    assert all(hasattr(router, name) for name in router.__all__)


def test_router_workers_stay_light() -> None:
    heavy = "{'numba', 'llvmlite', 'cache_index', 'simulator', 'ortools'} & set(sys.modules)"
    for what in ("from router import *", "import conductor.cli.worker"):
        program = f"import sys\n{what}\nsys.exit(str({heavy}) if {heavy} else 0)"
        subprocess.run([sys.executable, "-c", program], check=True)


def test_workers_do_without_the_rest_api() -> None:
    program = "import sys, conductor.cli.worker; sys.exit(int('fastapi' in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True)
