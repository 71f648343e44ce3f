"""One named error for each way in which a message can be wrong, and for each reason to reject a sound update."""

from __future__ import annotations

from ..core.errors import FlashError


class WireError(FlashError):
    """The bytes are not a message this side can accept."""


class BadMagic(WireError):
    """The bytes do not begin like a message."""


class BadVersion(WireError):
    """The message is in a version of the format that this side cannot read."""


class BadLength(WireError):
    """A message, a section or a field has the wrong length."""


class TrailingBytes(WireError):
    """Bytes are left over after the end of a message or a section."""


class BadChecksum(WireError):
    """The bytes changed on their way."""


class WrongLayout(WireError):
    """The sender has another model."""


class TooLarge(WireError):
    """A message, or a part of one, is above the receiver's limits."""


class BadField(WireError):
    """A field holds a value the format does not allow."""


class BadSection(WireError):
    """A section is unknown, repeated, missing, or not allowed in this kind of message."""


class BadCount(WireError):
    """A number of items is impossible, or not the number that follows."""


class BadOrder(WireError):
    """Names are not strictly ascending."""


class OutOfRange(WireError):
    """A position lies outside the set it points into."""


class NonFinite(WireError):
    """A number is infinite or not a number."""


class BadMask(WireError):
    """A recipe does not give the mask whose hash was sent with it."""


class UnknownMask(WireError):
    """The message refers to a mask that this side does not hold. `hash` names it: ask the sender for the full mask."""

    def __init__(self, hash: str) -> None:
        super().__init__(f"the message refers to the mask {hash}, which is not held here; ask for the full mask")
        self.hash = hash


class Distrusted(WireError):
    """A well-formed update does not fit the order it answers."""


class WrongTag(Distrusted):
    """The update answers another round, or comes from another client."""


class WrongContent(Distrusted):
    """The update does not carry what the order asked for."""


class WrongDensity(Distrusted):
    """The update has another number of active weights than expected."""


class NegativeVariance(Distrusted):
    """A running variance is below zero."""
