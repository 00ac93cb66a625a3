"""Embeddings, ranks and scores in vLLM's shapes, made of the tokens alone; they take no time on the engine."""

from __future__ import annotations

import hashlib
import time
import uuid
from array import array
from collections.abc import Sequence
from math import sqrt
from typing import Any, Final

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simulator.emulator.inference import InferenceService
from simulator.emulator.openai_api import Tokens, bad_request, parse

DIMENSIONS: Final = 16


class EmbeddingRequest(BaseModel):
    model: str | None = None
    input: str | Tokens | list[str] | list[Tokens] = Field(min_length=1)


class RerankRequest(BaseModel):
    model: str | None = None
    query: str
    documents: list[str] = Field(min_length=1)
    top_n: int = Field(default=0, ge=0)


class ScoreRequest(BaseModel):
    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]


class PoolingApi:
    """The routes of a pooling model."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def embeddings(self, request: Request) -> Response:
        asked = parse(EmbeddingRequest, await request.body())
        self._service.check_model(asked.model)
        inputs = asked.input
        batch = [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs
        prompts = [await self._service.encode(each) if isinstance(each, str) else each for each in batch]
        data = [
            {"index": index, "object": "embedding", "embedding": _embedding(prompt)}
            for index, prompt in enumerate(prompts)
        ]
        tokens = sum(map(len, prompts))
        return JSONResponse(
            {
                "id": f"embd-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": self._service.model,
                "data": data,
                "usage": _usage(tokens) | {"completion_tokens": 0, "prompt_tokens_details": None},
            }
        )

    async def rerank(self, request: Request) -> Response:
        asked = parse(RerankRequest, await request.body())
        self._service.check_model(asked.model)
        scores, tokens = await self._scores([asked.query] * len(asked.documents), asked.documents)
        results = [
            {"index": index, "document": {"text": asked.documents[index]}, "relevance_score": score}
            for index, score in enumerate(scores)
        ]
        results.sort(key=lambda result: -scores[int(str(result["index"]))])
        return JSONResponse(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": self._service.model,
                "usage": _usage(tokens),
                "results": results[: asked.top_n or None],
            }
        )

    async def score(self, request: Request) -> Response:
        asked = parse(ScoreRequest, await request.body())
        self._service.check_model(asked.model)
        first = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
        second = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second) or not first:
            raise bad_request("text_1 must be one text, or as many as text_2 has.", "text_1")
        scores, tokens = await self._scores(first, second)
        return JSONResponse(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": self._service.model,
                "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
                "usage": _usage(tokens),
            }
        )

    async def _scores(self, first: list[str], second: list[str]) -> tuple[list[float], int]:
        """The cosine of each pair's embeddings as a share of 1, and the tokens of them all."""
        scores, tokens = [], 0
        for one, other in zip(first, second, strict=True):
            left, right = await self._service.encode(one), await self._service.encode(other)
            tokens += len(left) + len(right)
            cosine = sum(a * b for a, b in zip(_embedding(left), _embedding(right), strict=True))
            scores.append((1 + cosine) / 2)
        return scores, tokens


def _embedding(tokens: Sequence[int]) -> list[float]:
    """A unit vector that the tokens determine."""
    digest = hashlib.blake2b(array("I", tokens).tobytes(), digest_size=DIMENSIONS).digest()
    values = [byte - 127.5 for byte in digest]
    length = sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
