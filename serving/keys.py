"""API keys: who calls, and how much of the server each may have. Plain Python: no gRPC; whoever calls brings `now`.

The file is JSON; all fields of a key but the first two may be left out:

    {"keys": [{"name": "acme", "sha256": "<64 hex digits>",
               "requests_per_minute": 60, "max_concurrent": 4, "highest_priority": "STANDARD"}]}

It holds the SHA-256 of each key, never a key. Keys are 32 random bytes, so a plain hash gives nothing away;
`python -m serving.keys NAME` makes one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fishjax.errors import InvalidRequest, LimitReached, NotAllowed, Unauthenticated

from .config import ServerConfig
from .plan import Priority

_SCHEME = "bearer "
_NAME = re.compile(r"[\w.-]{1,64}")
_NAME_RULE = "name must be 1 to 64 letters, digits, '.', '_' or '-'"
_RETRY_S = 1.0  # when a key has too many requests at once: nobody knows when one of them ends


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who calls, and the limits: requests a minute (a minute's worth may come at once), requests at once, class."""

    name: str
    sha256: str
    requests_per_minute: float = math.inf
    max_concurrent: float = math.inf
    highest_priority: Priority = Priority.REALTIME

    def priority(self, asked: Priority | None) -> Priority:
        """The class of a request; None: the key's best up to STANDARD. Raises NotAllowed."""
        if asked is None:
            return max(Priority.STANDARD, self.highest_priority)
        if asked < self.highest_priority:
            raise NotAllowed(f"this key may ask for {self.highest_priority.name} at most, not for {asked.name}")
        return asked


ANYBODY = ApiKey("-", "")
"""Who calls a server without keys."""


@dataclass(slots=True)
class _Use:
    allowance: float  # requests that may come now
    since_s: float
    active: int = 0


class KeyRing:
    """The keys of a server and what is going on under each. Without keys everybody may call."""

    def __init__(self, keys: Sequence[ApiKey] = ()):
        self._by_hash = {key.sha256: key for key in keys}
        self._uses: dict[str, _Use] = {}

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """Raises InvalidRequest for a file that is not in order; says which key and field, and shows no hash."""
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))["keys"]
            keys = [_parse(entry, number) for number, entry in enumerate(entries, start=1)]
        except OSError as error:
            raise InvalidRequest(f"the file of API keys cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest('the file of API keys cannot be read: it must be JSON, {"keys": [...]}') from error
        if not keys:
            raise InvalidRequest("the file of API keys holds no key: nobody could call")
        for field in ("name", "sha256"):
            if len({getattr(key, field) for key in keys}) < len(keys):
                raise InvalidRequest(f"the file of API keys has the same {field} twice")
        return cls(keys)

    def authenticate(self, authorization: str | None) -> ApiKey:
        """Whose `authorization: Bearer KEY` this is. Raises Unauthenticated."""
        if not self._by_hash:
            return ANYBODY
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise Unauthenticated("this server wants an API key: send the metadata 'authorization: Bearer KEY'")
        digest = hashlib.sha256(authorization[len(_SCHEME) :].strip().encode("utf-8")).hexdigest()
        if (key := self._by_hash.get(digest)) is None:
            raise Unauthenticated("this API key is not known here")
        return key

    @contextmanager
    def using(self, key: ApiKey, now_s: float) -> Iterator[None]:
        """One request under a key, from now until left. Raises LimitReached, with the time to wait."""
        use = self._uses.setdefault(key.name, _Use(key.requests_per_minute, now_s))
        if math.isfinite(key.requests_per_minute):
            rate_hz = key.requests_per_minute / 60
            use.allowance = min(key.requests_per_minute, use.allowance + rate_hz * (now_s - use.since_s))
            use.since_s = now_s
            if use.allowance < 1:
                wait_s = (1 - use.allowance) / rate_hz
                raise LimitReached(
                    f"this key has used its {key.requests_per_minute:g} requests a minute: try again in {wait_s:.1f} s",
                    wait_s,
                )
        if use.active >= key.max_concurrent:
            raise LimitReached(
                f"this key has {use.active} requests at once, which is its limit: wait until one has ended", _RETRY_S
            )
        use.allowance -= 1
        use.active += 1
        try:
            yield
        finally:
            use.active -= 1


def read_keys(config: ServerConfig) -> KeyRing:
    """The keys that a server asks for. Raises InvalidRequest as `KeyRing.from_file`."""
    return KeyRing() if config.api_keys is None else KeyRing.from_file(config.api_keys)


def _parse(entry: dict[str, Any], number: int) -> ApiKey:
    def wrong(what: str) -> InvalidRequest:
        return InvalidRequest(f"key {number} in the file of API keys: {what}")

    if unknown := set(entry) - {field.name for field in fields(ApiKey)}:
        raise wrong(f"the field {min(unknown)!r} is unknown")
    if not isinstance(entry.get("name"), str) or not _NAME.fullmatch(entry["name"]):
        raise wrong(_NAME_RULE)
    if not re.fullmatch(r"[0-9a-f]{64}", str(entry.get("sha256"))):
        raise wrong("sha256 must be 64 hexadecimal digits in lower case")
    values = dict(entry)
    for field in ("requests_per_minute", "max_concurrent"):
        value = values.get(field, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
            raise wrong(f"{field} must be a number of at least 1")
    if "highest_priority" in values:
        if values["highest_priority"] not in Priority.__members__:
            raise wrong(f"highest_priority must be one of {', '.join(Priority.__members__)}")
        values["highest_priority"] = Priority[values["highest_priority"]]
    return ApiKey(**values)


def main() -> None:
    """Command line: make a key, and say what goes where."""
    parser = argparse.ArgumentParser(prog="python -m serving.keys", description="Make an API key for a caller.")
    parser.add_argument("name", metavar="NAME", help="whose key it is: 1 to 64 letters, digits, '.', '_' or '-'")
    name = parser.parse_args().name
    if not _NAME.fullmatch(name):
        parser.error(f"{_NAME_RULE}, not {name!r}")
    secret = secrets.token_urlsafe(32)
    print(f"key, to be given to {name}; it is shown this once: {secret}")
    print("entry for the file of --api-keys:")
    print(json.dumps({"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest()}))


if __name__ == "__main__":
    main()
