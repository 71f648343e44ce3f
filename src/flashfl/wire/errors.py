"""One named error for each way in which bytes can be wrong, and for each reason not to believe a sound message."""

from __future__ import annotations

from ..core.errors import FlashError


class WireError(FlashError):
    """The bytes are not a message this side can accept."""


class BadMagic(WireError):
    """The bytes do not begin as a message does."""


class BadVersion(WireError):
    """A version of the format that this side does not speak."""


class BadLength(WireError):
    """A field or a section is shorter or longer than it has to be."""


class TrailingBytes(WireError):
    """Bytes are left over after the end of a message or a section."""


class BadChecksum(WireError):
    """The bytes changed on their way."""


class WrongLayout(WireError):
    """The sender's model is laid out differently."""


class TooLarge(WireError):
    """A message, or a part of one, is above the receiver's limits."""


class BadField(WireError):
    """A field holds a value the format does not allow."""


class BadSection(WireError):
    """A section that is unknown, repeated, missing, or out of place in this kind of message."""


class BadCount(WireError):
    """A number of items is impossible or is not the number that follows."""


class BadOrder(WireError):
    """Names are not strictly ascending."""


class OutOfRange(WireError):
    """A position lies outside the set it points into."""


class NonFinite(WireError):
    """A number is infinite or not a number."""


class BadMask(WireError):
    """A mask that was described is not the mask whose hash was given."""


class UnknownMask(WireError):
    """A mask the sender takes for granted is not known here; `hash` names it, so that the full one can be asked for."""

    def __init__(self, hash: str) -> None:
        super().__init__(f"the mask {hash} is not known here: ask for the full one")
        self.hash = hash


class UnknownFixed(WireError):
    """A fixed tensor that the sender takes for granted is not known here; `hash` names it."""

    def __init__(self, name: str, hash: str) -> None:
        super().__init__(f"the fixed tensor {name!r} ({hash}) is not known here: ask for it")
        self.name, self.hash = name, hash


class Distrusted(WireError):
    """A well-formed update that does not fit the order that caused it."""


class WrongTag(Distrusted):
    """The update answers another round, or comes from another client."""


class WrongContent(Distrusted):
    """The update does not carry what the order asked for."""


class WrongDensity(Distrusted):
    """The number of active weights is not the one expected."""


class NegativeVariance(Distrusted):
    """A running variance is below zero."""


class ChangeTooLarge(Distrusted):
    """The weights moved much further than those of the rest of the cohort."""
