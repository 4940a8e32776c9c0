"""API keys: only hashes are kept, and all of them are compared, in constant time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from jaxllm.server.config import MAX_KEY_LENGTH
from jaxllm.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Routes that need no key."""


class Keys:
    """Who may come in: whoever has a key of one of the SHA-256 digests; everybody if there are none."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self._digests = digests

    def check(self, path: str, authorization: bytes | None) -> None:
        """Verify that a request has a key: `Bearer KEY`, or as the password of `Basic`, as browsers send it.

        Raises:
            ApiError: it does not.
        """
        if not self._digests or path in OPEN_PATHS:
            return
        key = _key(authorization)
        digest = hashlib.sha256(key or b"").digest()
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        if not is_known or key is None:
            what = "the API key is not known here" if key else "an API key is needed"
            raise ApiError(
                401,
                f"{what}: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={
                    "WWW-Authenticate": 'Basic realm="jaxllm, any name and the API key", charset="UTF-8"'
                },
            )


def _key(authorization: bytes | None) -> bytes | None:
    kind, _, value = (authorization or b"").strip().partition(b" ")
    value = value.strip()
    if not value or len(value) > 2 * MAX_KEY_LENGTH:
        return None
    if kind.lower() == b"bearer":
        return value
    if kind.lower() != b"basic":
        return None
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2] or None
    except binascii.Error:
        return None
