"""Why a party of a secure round refuses to go on. Each kind of refusal has its own name."""

from __future__ import annotations

from ..core.errors import FlashError


class Refused(FlashError):
    """A party refuses a message of a secure round. A client that refuses reveals nothing more in this attempt."""


class Malformed(Refused):
    """The bytes are no message of this protocol."""


class WrongRound(Refused):
    """The message belongs to another round or attempt, or the parties have different settings."""


class WrongStep(Refused):
    """The message comes too early or a second time."""


class UnknownIdentity(Refused):
    """A member of the cohort has no identity key in the client's list."""


class BadSignature(Refused):
    """A signature does not fit the message and the identity key."""


class CohortTooSmall(Refused):
    """So few clients are left that their sum would say too much about each."""


class DifferentCohorts(Refused):
    """Clients were shown different cohorts, survivors or models."""


class AsksForBoth(Refused):
    """The server asks for a client's mask key and for its self-mask. Together they open its input."""


class SecondInput(Refused):
    """The client has given its input to a sum of this round before."""


class BadShare(Refused):
    """A secret share is damaged, forged, or was made for another cohort."""


class Unmasked(Refused):
    """The server asks for an input without masks, and the client takes part in secure rounds only."""


class TooFew(Refused):
    """Too few clients are left to open the sum. The round can be repeated with new keys."""


class TooLittleNoise(Refused):
    """The server wants less noise for differential privacy than the client insists on, or than can be drawn exactly."""
