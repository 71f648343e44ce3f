"""Every message that a hostile server or client can change, repeat, withhold or invent is refused by its name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from secure_support import World, plain_sum, random_vectors

from flashfl.core.errors import ConfigError
from flashfl.privacy import errors
from flashfl.privacy.client import Party
from flashfl.privacy.keys import Directory, Identity
from flashfl.privacy.messages import BOX, CARD, HEADER, STEPS, VOTE, Terms, entries, flags, frame, listing
from flashfl.privacy.policy import Policy
from flashfl.privacy.server import Collector
from flashfl.privacy.vector import Noise


def named(step: int) -> str:
    return STEPS[step].replace(" ", "-")


def refused(world: World) -> dict[str, int]:
    """How many clients refused, by name."""
    names = [type(why).__name__ for why in world.refused.values()]
    return {name: names.count(name) for name in set(names)}


class Recorder:
    """A server that keeps what it sent in one step, and sends it again later."""

    def __init__(self, step: int) -> None:
        self.step, self.old, self.replays = step, dict[int, bytes](), False

    def __call__(self, step: int, client: int, data: bytes) -> bytes:
        if step != self.step:
            return data
        return self.old[client] if self.replays else self.old.setdefault(client, data)


@pytest.mark.parametrize("step", range(1, 5), ids=named)
def test_message_of_an_earlier_attempt_is_refused(step: int) -> None:
    world, vectors, server = World(10), random_vectors(10), Recorder(step)
    world.round(vectors, tamper=server)
    server.replays = True
    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=server, attempt=1, round=1)
    assert refused(world) == {"WrongRound": 10}


@pytest.mark.parametrize(("step", "name"), [(1, "BadSignature"), (2, "BadShare"), (4, "DifferentCohorts")])
def test_attempt_that_begins_again_has_no_use_for_its_first_messages(step: int, name: str) -> None:
    """The same round and attempt twice: clients have new keys, so nothing from the first time fits."""
    world, vectors, server = World(10), random_vectors(10), Recorder(step)
    world.round(vectors, tamper=server)
    world.forget()  # else they would refuse for that reason
    server.replays = True
    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=server)
    assert refused(world) == {name: 10}


@pytest.mark.parametrize("at", range(5), ids=named)
def test_step_out_of_order_or_twice_is_refused(at: int) -> None:
    terms = Terms("test", (2, 0, 0), 300, 32, Policy(), 3)
    for asked in range(5):
        party = Party(terms, World(3).selves[0], step=at)
        work = (party.advertise, party.share, party.mask, party.confirm, party.unmask)[asked]
        needs = ((), (b"",), (b"", np.zeros(300, np.uint32), b""), (b"",), (b"",))[asked]
        if asked != at:
            with pytest.raises((errors.WrongStep, errors.AsksForBoth)):
                work(*needs)  # type: ignore[operator]


def test_share_that_was_sealed_for_another_client_is_refused() -> None:
    world, vectors, first = World(10), random_vectors(10), dict[int, bytes]()

    def redirect(step: int, client: int, data: bytes) -> bytes:
        if step == 2:
            first.setdefault(0, data)
        return first[0] if step == 2 and client == 1 else data  # client 1 gets the shares of client 0

    world.round(vectors, tamper=redirect)
    assert refused(world) == {"BadShare": 1}


def test_server_that_hides_a_card_of_the_client_itself_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)

    def without_itself(step: int, client: int, data: bytes) -> bytes:
        if step != 1:
            return data
        cards = entries(memoryview(data)[HEADER:], CARD).tolist()
        return data[:HEADER] + listing(CARD, [card for card in cards if card[0] != client])

    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=without_itself)
    assert refused(world) == {"DifferentCohorts": 10}


def test_cohort_larger_than_announced_is_refused_as_its_sum_could_overflow() -> None:
    world = World(10)
    terms = Terms("test", (2, 0, 0), 300, 32, world.policy, 9)
    parties = [Party(terms, world.selves[i]) for i in range(10)]
    cards = b"".join(party.advertise()[HEADER:] for party in parties)
    with pytest.raises(errors.WrongRound, match="10 clients, and the server announced 9: their sum could overflow"):
        parties[0].share(frame(1, terms, cards))


@pytest.mark.parametrize(("vote", "name"), [("forged", "BadSignature"), ("outsider", "DifferentCohorts")])
def test_vote_that_no_survivor_gave_is_refused(vote: str, name: str) -> None:
    """Six survivors voted, seven are needed: the server invents one, or takes that of a client that dropped out."""
    world, vectors = World(10), random_vectors(10)

    def invent(step: int, client: int, data: bytes) -> bytes:
        if step != 4:
            return data
        votes = entries(memoryview(data)[HEADER:], VOTE).tolist()
        new = (votes[1][0] if vote == "forged" else 9, votes[0][1], votes[0][2])
        return data[:HEADER] + listing(VOTE, [votes[0], *votes[2:], new])

    with pytest.raises(errors.TooFew):
        world.round(vectors, killed={9: 2}, tamper=invent)
    assert refused(world) == {name: 9}


def test_server_that_leaves_a_client_off_both_lists_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)

    def silent(step: int, client: int, data: bytes) -> bytes:
        return data[:HEADER] + flags(set(range(9)), range(10)) + flags(set(), range(10)) if step == 3 else data

    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=silent)
    assert refused(world) == {"DifferentCohorts": 10}


def test_more_neighbours_than_chance_allows_are_refused() -> None:
    world = World(10)
    party = Party(Terms("test", (2, 0, 0), 300, 32, world.policy, 10), world.selves[0], chosen=(1, 2))
    boxes = np.frombuffer(listing(BOX, [(i, bytes(82)) for i in range(1, 10)]), BOX)
    with pytest.raises(errors.Malformed, match="9 clients chose this client as a neighbour, at most 8 are allowed"):
        party._open_boxes(boxes)


# A client that cheats.


def test_client_that_answers_for_another_or_twice_is_refused() -> None:
    world = World(3)
    terms = Terms("test", (2, 0, 0), 9, 32, world.policy, 3)
    server, card = Collector(terms), Party(terms, world.selves[1]).advertise()
    with pytest.raises(errors.Malformed, match="client 0 must send one entry, with its own id"):
        server.received(0, card)
    server.received(1, card)
    with pytest.raises(errors.WrongStep, match="already answered"):
        server.received(1, card)


def test_client_under_two_ids_is_refused() -> None:
    """It signs a second id's card with its own key, or has its key listed twice."""
    world, vectors = World(10), random_vectors(10)
    me = world.selves[3]
    world.selves[4] = type(me)(4, me.identity, me.directory, me.gives)
    with pytest.raises(errors.TooFew):
        world.round(vectors)
    assert refused(world) == {"BadSignature": 10}
    key = Identity.new().public
    with pytest.raises(ConfigError, match="clients 3 and 4 have the same identity key"):
        Directory({3: key, 4: key})


def test_client_that_shares_with_too_few_neighbours_is_dropped() -> None:
    world, vectors = World(10), random_vectors(10)
    original = Party.share

    def lazy(self: Party, roster: bytes) -> bytes:
        answer = original(self, roster)
        return answer[: -BOX.itemsize] if self.me.id == 3 else answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Party, "share", lazy)
        with pytest.raises(errors.Malformed, match="client 3 must send a share to each of 9 other clients"):
            world.round(vectors)


def test_vector_of_another_length_is_refused_on_both_sides() -> None:
    world, vectors = World(5), random_vectors(5)
    vectors[2] = vectors[2][:-1]
    server = world.round(vectors)
    assert refused(world) == {"WrongRound": 1}
    assert np.array_equal(server.opened(), plain_sum(vectors, (0, 1, 3, 4)))


# Terms.


def test_server_that_wants_less_noise_than_the_client_insists_on_is_refused() -> None:
    insists = Policy(noise=4.0)
    for offered in (None, Noise(1.0, 3.9)):
        with pytest.raises(errors.TooLittleNoise, match="this client requires at least 4"):
            Terms.from_bytes(Terms("r", (2, 0, 0), 9, 32, insists, 3, noise=offered).to_bytes(), insists)
    assert Terms.from_bytes(Terms("r", (2, 0, 0), 9, 32, insists, 3, noise=Noise(1.0, 4.0)).to_bytes(), insists).noise


@pytest.mark.parametrize(
    "change",
    [
        {2: 0},
        {3: 16},
        {4: 0},
        {5: [0, 1]},
        {6: [1.0, math.nan]},
        {6: [0.0, 1.0]},
        {6: [math.inf, 1.0]},
        {6: [1.0, -4.0]},
    ],
    ids=str,
)
def test_terms_that_make_no_sense_are_refused(change: dict[int, object]) -> None:
    fields = json.loads(Terms("r", (2, 0, 0), 9, 32, Policy(), 3, noise=Noise(1.0, 1.0)).to_bytes())
    for at, value in change.items():
        fields[at] = value
    with pytest.raises(errors.Malformed):
        Terms.from_bytes(json.dumps(fields).encode(), Policy())
