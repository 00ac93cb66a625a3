"""One emulated cluster for the tests that leave it as they found it."""

from collections.abc import Iterator

import openai
import pytest
from front_door_process import FrontDoor, front_door


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Two prefill and two decode engines behind the front door."""
    with front_door(tmp_path_factory.mktemp("cluster"), "--emulate", "2p2d", "--emulate-speed", "10") as door:
        yield door


@pytest.fixture(scope="session")
def client(cluster: FrontDoor) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
        yield client
