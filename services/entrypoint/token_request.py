"""What a token-level request may hold. Pure.

Source: reliability-and-security.md, section 3; protos/pelagos/entrypoint/v1/entrypoint.proto.
"""

from __future__ import annotations

import math
from typing import Final

from pelagos.entrypoint.v1 import entrypoint_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.ids import is_request_id

MAX_TOKENS: Final = 393_216
MAX_CACHE_SALT_CHARS: Final = 256
MAX_STOP_IDS: Final = 64


def check_request(request: pb.GenerateRequest, max_model_len: int) -> None:
    """Raises Failure(INVALID_REQUEST, CONTEXT_LENGTH) naming the field and its limit."""
    if len(request.prompt_tokens) % 4 or not request.prompt_tokens:
        raise Failure(Reason.INVALID_REQUEST, "prompt_tokens must hold one or more u32")
    if request.request_id and not is_request_id(request.request_id):
        raise Failure(Reason.INVALID_REQUEST, "request_id has characters that are not allowed")
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        raise Failure(
            Reason.INVALID_REQUEST, f"cache_salt is longer than {MAX_CACHE_SALT_CHARS} characters"
        )
    sampling = request.sampling
    if not 1 <= sampling.max_tokens <= MAX_TOKENS:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"max_tokens must be in [1, {MAX_TOKENS}]",
            {"max_tokens": str(sampling.max_tokens)},
        )
    # Written so that NaN fails too.
    if not (0 <= sampling.temperature <= 2 and 0 <= sampling.top_p <= 1) or not math.isfinite(
        sampling.temperature
    ):
        raise Failure(Reason.INVALID_REQUEST, "temperature or top_p is out of range")
    if sampling.top_logprobs > 20 or (sampling.top_logprobs and not sampling.logprobs):
        raise Failure(Reason.INVALID_REQUEST, "top_logprobs must be in [0, 20] and needs logprobs")
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        raise Failure(
            Reason.INVALID_REQUEST, f"stop_token_ids has more than {MAX_STOP_IDS} entries"
        )
    num_tokens = len(request.prompt_tokens) // 4
    if max_model_len and num_tokens >= max_model_len:
        raise Failure(
            Reason.CONTEXT_LENGTH,
            f"the prompt has {num_tokens} tokens, the model takes {max_model_len}",
            {"num_tokens": str(num_tokens), "max_tokens": str(max_model_len)},
        )
