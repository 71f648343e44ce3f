"""The cryptography of a secure round: thin wrappers around the `cryptography` package, nothing of our own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from .errors import BadShare, BadSignature, UnknownIdentity

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise ConfigError(
        f"secure aggregation needs the cryptography package ({error}): pip install 'flashfl[privacy]'"
    ) from None

MAKE_KEYS = "Make keys with: python -m flashfl.flower.private FOLDER CLIENT"
KEY = 32  # bytes of a key or a digest
SIGNATURE = 64
TAG = 16  # bytes that authenticated encryption adds
_NONCE = bytes(12)  # every encryption key is used for one message, so a fixed nonce is safe
_BLOCK = 1 << 18  # bytes of keystream made at a time: they stay in the cache
Words = np.ndarray[Any, np.dtype[Any]]  # uint32 or uint64


class Identity:
    """A client's long-lived signing key."""

    def __init__(self, private: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private)

    @staticmethod
    def new() -> Identity:
        return Identity(os.urandom(KEY))

    @property
    def public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        return self._key.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


class Directory:
    """The public identity keys of all clients. It must reach clients outside the server."""

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        by_key = {key: client for client, key in keys.items()}
        for client, key in keys.items():
            if (other := by_key[key]) != client:
                raise ConfigError(
                    f"clients {client} and {other} have the same identity key, so one party would count as two "
                    "clients: give every client its own key"
                )
        self._keys = {client: Ed25519PublicKey.from_public_bytes(key) for client, key in keys.items()}

    @staticmethod
    def read(path: Path) -> Directory:
        """From a JSON file: client id -> public key in hex."""
        try:
            return Directory({int(k): bytes.fromhex(v) for k, v in json.loads(path.read_text()).items()})
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"cannot read the identity keys in {path} ({error}): expected JSON, client id -> public key in hex. "
                f"{MAKE_KEYS}"
            ) from None

    def check(self, client: int, message: bytes, signature: bytes) -> None:
        """Raise BadSignature unless the client signed this message."""
        if (key := self._keys.get(client)) is None:
            raise UnknownIdentity(
                f"client {client} is in the cohort, but has no public key in this client's list. Add its key to "
                f"identities.json, and give this file to every node (settings `identity` and `identities`). {MAKE_KEYS}"
            )
        try:
            key.verify(signature, message)
        except InvalidSignature:
            raise BadSignature(
                f"the signature of client {client} does not fit its public key in this client's list. Check that the "
                f"node of client {client} has its own `identity`. If it has a new key, give the new identities.json to "
                f"every node. Otherwise somebody may pose as client {client}."
            ) from None


def public_of(private: bytes) -> bytes:
    """The public half of a key pair for one attempt of one round."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, other: bytes, purpose: bytes) -> bytes:
    """The key that the owners of this private and of the `other` public key share for one purpose."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # a public key of low order gives a secret that everyone knows
        raise BadSignature("a public key of the cohort is not a valid X25519 key") from None
    return HKDF(SHA256(), KEY, None, purpose).derive(secret)


def seal(key: bytes, message: bytes, bound_to: bytes) -> bytes:
    """Encrypt and authenticate. A key must be used once only."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, message, bound_to)


def unseal(key: bytes, box: bytes, bound_to: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, box, bound_to)
    except InvalidTag:
        raise BadShare("an encrypted share is damaged, forged, or was made for another cohort") from None


def add_streams(words: Words, add: Iterable[bytes], subtract: Iterable[bytes] = ()) -> None:
    """Add the ChaCha20 keystreams of some keys to words of Z/2^b, and subtract others, in place."""
    streams = [
        (Cipher(ChaCha20(key, bytes(16)), None).encryptor(), change)
        for change, keys in ((np.add, add), (np.subtract, subtract))
        for key in keys
    ]
    zeros, drawn = bytes(_BLOCK), bytearray(_BLOCK)
    stream = np.frombuffer(drawn, words.dtype)
    for at in range(0, len(words), len(stream)):
        part = words[at : at + len(stream)]
        size = part.nbytes
        for cipher, change in streams:
            cipher.update_into(memoryview(zeros)[:size], memoryview(drawn)[:size])
            change(part, stream[: len(part)], out=part)
