"""Who may ask: keys from a file or the environment, compared in constant time and never shown."""

import hmac
import os
from hashlib import sha256
from pathlib import Path

from dlm.errors import UserError
from dlm.serving.config import KEYS_VARIABLE, ServeSection

SHORTEST = 8


class Keys:
    """The keys that may ask; without any, everybody may."""

    def __init__(self, keys: list[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @classmethod
    def of(cls, section: ServeSection) -> "Keys":
        """Keys of the file, else of the environment. Raises UserError for a file that cannot be read, or holds none."""
        if section.api_keys_file is None:
            return cls(_checked(os.environ.get(KEYS_VARIABLE, "").split(), KEYS_VARIABLE))
        file: Path = section.api_keys_file
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"serve.api_keys_file = {str(file)!r}: cannot be read: {reason}") from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise UserError(f"serve.api_keys_file = {str(file)!r} holds no key: write one a line, or leave it out")
        return cls(_checked(keys, str(file)))

    @property
    def needed(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._keys)

    def owner(self, header: str | None) -> str | None:
        """A short name of the key in an Authorization header; None where it is not one of ours."""
        scheme, _, given = (header or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        offered, found = given.strip().encode("utf-8", "surrogateescape"), False
        for key in self._keys:  # all of them: how long it takes says nothing
            found |= hmac.compare_digest(sha256(key).digest(), sha256(offered).digest())
        return owner_of(offered) if found else None


def owner_of(key: bytes) -> str:
    """What stands for a key in logs and traces."""
    return sha256(b"dlm owner " + key).hexdigest()[:12]


def _checked(keys: list[str], where: str) -> list[str]:
    for number, key in enumerate(keys, start=1):
        if len(key) < SHORTEST or not key.isascii() or " " in key:
            raise UserError(
                f"{where}: key {number} must be at least {SHORTEST} ASCII characters without spaces, so that it can stand in "
                "a header and not be guessed"
            )
    return keys
