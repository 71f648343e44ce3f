"""The secure sum: exact, robust to dropouts at every step, refused by clients if the server cheats."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import pytest
from secure_support import World, plain_sum, random_vectors

from flashfl.core.errors import ConfigError
from flashfl.privacy import errors
from flashfl.privacy.client import Party
from flashfl.privacy.keys import KEY, Identity, add_streams, agree, public_of, seal, unseal
from flashfl.privacy.messages import BOX, CARD, HEADER, STEPS, VOTE, Terms, entries, flags, frame, listing, unframe
from flashfl.privacy.policy import COMPLETE, Policy
from flashfl.privacy.server import Collector


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [3, 10])
def test_secure_sum_equals_plain_sum(clients: int, bits: int) -> None:
    vectors = random_vectors(clients, 70_000, bits)
    assert np.array_equal(World(clients).round(vectors).opened(), plain_sum(vectors))


@pytest.mark.parametrize("step", range(5), ids=lambda step: STEPS[step].replace(" ", "-"))
def test_clients_killed_at_each_step_leave_the_exact_sum_of_the_rest(step: int) -> None:
    vectors = random_vectors(10)
    server = World(10).round(vectors, killed={2: step, 5: step, 9: step} if step else {2: 0, 5: 0})
    counted = set(range(10)) - ({2, 5, 9} if step else {2, 5}) if step < 3 else range(10)
    assert np.array_equal(server.opened(), plain_sum(vectors, sorted(counted)))


def test_clients_killed_at_different_steps_of_one_round() -> None:
    vectors = random_vectors(16)
    server = World(16).round(vectors, killed={0: 0, 4: 1, 7: 2, 8: 3, 12: 4})
    assert np.array_equal(server.opened(), plain_sum(vectors, set(range(16)) - {0, 4, 7}))


def test_sparse_graph_sum_is_exact_with_dropouts() -> None:
    clients = COMPLETE + 20
    k, threshold = Policy().neighbours(clients)
    assert threshold < k < clients // 2
    vectors = random_vectors(clients, 50)
    killed = {3: 1, 10: 2, 11: 2, 30: 2, 31: 3, 45: 4}
    world = World(clients)
    assert np.array_equal(world.round(vectors, killed).opened(), plain_sum(vectors, set(vectors) - {3, 10, 11, 30}))
    assert {len(party.chosen) for party in world.parties.values()} <= {0, k}


@pytest.mark.parametrize("step", range(1, 5), ids=lambda step: STEPS[step].replace(" ", "-"))
def test_round_below_threshold_opens_nothing_and_can_be_repeated(step: int) -> None:
    world, vectors = World(10), random_vectors(10)
    with pytest.raises(errors.TooFew, match=r"6 of 10 clients that sent keys are left .* at least 7 are needed"):
        world.round(vectors, killed=dict.fromkeys([1, 2, 3, 4], step))
    if step > 1:  # inputs were given: the model can only be sent again under the next round's number
        with pytest.raises(errors.TooFew):
            world.round(vectors, attempt=1)
        assert refusals(world) == {errors.SecondInput}
    server = world.round(vectors, attempt=1, round=1 if step > 1 else 0)
    assert np.array_equal(server.opened(), plain_sum(vectors))


def test_client_gives_one_input_a_round_even_if_others_open_the_sum_without_it() -> None:
    """The server drops client 0 after its input is in, opens the sum, and asks for it again among other clients."""
    world, vectors = World(20), random_vectors(20)
    first = world.round({i: vectors[i] for i in range(10)}, killed={0: 3})
    assert np.array_equal(first.opened(), plain_sum(vectors, range(10)))
    second = world.round({i: vectors[i] for i in (0, *range(10, 20))}, attempt=1)
    assert refusals(world) == {errors.SecondInput}
    assert np.array_equal(second.opened(), plain_sum(vectors, range(10, 20)))


def test_clients_give_one_input_a_round_even_if_the_server_says_that_the_first_sum_failed() -> None:
    world, vectors = World(10), random_vectors(10)
    world.round(vectors).opened()
    with pytest.raises(errors.TooFew):
        world.round(vectors, attempt=1)
    assert refusals(world) == {errors.SecondInput}
    assert len(world.refused) == 10


def test_every_attempt_has_fresh_keys() -> None:
    world, vectors = World(5), random_vectors(5)
    keys = []
    for attempt in range(2):
        with pytest.raises(errors.TooFew):
            world.round(vectors, killed=dict.fromkeys([0, 1, 2], 2), attempt=attempt)
        keys += [party.mask_key for party in world.parties.values()] + [p.seed for p in world.parties.values()]
    assert len(set(keys)) == len(keys)


# A server that cheats. Each test names the refusal.


def refusals(world: World, clients: Iterable[int] | None = None) -> set[type[errors.Refused]]:
    return {type(world.refused[client]) for client in (world.refused if clients is None else clients)}


def test_server_that_lists_a_client_as_survivor_and_dropped_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)

    def tamper(step: int, client: int, data: bytes) -> bytes:
        return data[:HEADER] + data[HEADER : HEADER + 2] + flags({4}, range(10)) if step == 3 else data

    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=tamper)
    assert len(world.refused) == 10
    assert refusals(world) == {errors.AsksForBoth}
    assert "client 4" in str(world.refused[0])


def test_server_that_asks_twice_with_another_list_of_survivors_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)
    server = world.round(vectors, killed={9: 2})
    party = world.parties[0]
    lists = flags(set(range(8)), range(10)) + flags({8}, range(10))
    with pytest.raises(errors.AsksForBoth, match="second list"):
        party.confirm(frame(3, server.terms, lists))


def test_server_that_shows_different_survivors_to_different_clients_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)

    def tamper(step: int, client: int, data: bytes) -> bytes:
        if step == 3 and client < 5:  # these are told that client 9 dropped out: they would reveal its mask key
            return data[:HEADER] + flags(set(range(9)), range(10)) + flags({9}, range(10))
        return data

    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=tamper)
    assert refusals(world) == {errors.DifferentCohorts}
    assert len(world.refused) == 10


def test_server_that_withholds_contradicting_votes_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)
    halves = {True: range(5), False: range(5, 10)}

    def tamper(step: int, client: int, data: bytes) -> bytes:
        if step == 3 and client < 5:
            return data[:HEADER] + flags(set(range(9)), range(10)) + flags({9}, range(10))
        if step == 4:
            votes = entries(memoryview(data)[HEADER:], VOTE).tolist()
            return data[:HEADER] + listing(VOTE, [vote for vote in votes if vote[0] in halves[client < 5]])
        return data

    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=tamper)
    assert refusals(world) <= {errors.CohortTooSmall, errors.DifferentCohorts}
    assert len(world.refused) == 10


def test_server_that_shows_different_cohorts_is_refused() -> None:
    """Half of the clients get a cohort without client 9: shares of the other half do not open."""
    world, vectors = World(10), random_vectors(10)

    def tamper(step: int, client: int, data: bytes) -> bytes:
        if step == 1 and client < 5:
            return data[: HEADER + 9 * CARD.itemsize]
        return data

    with pytest.raises(errors.Malformed):  # an honest server notices first: it asked for 9 shares
        world.round(vectors, tamper=tamper)
    policy, ids = Policy(), range(10)
    terms = Terms("test", (2, 0, 7), 300, 32, policy, 10)
    parties = {i: Party(terms, world.selves[i]) for i in ids}
    cards = [row for i in ids for row in entries(memoryview(parties[i].advertise())[HEADER:], CARD).tolist()]
    boxes: dict[int, list[tuple[int, bytes]]] = {i: [] for i in ids}
    for i, party in parties.items():
        shown = cards if i < 5 else cards[:9] if i < 9 else cards
        answer = party.share(frame(1, terms, listing(CARD, shown)))
        for to, box in entries(memoryview(answer)[HEADER + 32 :], BOX).tolist():
            boxes[to].append((i, box))
    with pytest.raises(errors.BadShare, match=r"client \d+: .*another cohort"):
        parties[0].mask(frame(2, terms, flags(ids, ids), listing(BOX, boxes[0])), vectors[0], b"")


def test_server_that_sends_different_models_is_refused() -> None:
    """The masked sum of different models could single out one client (Pasquini et al. 2022)."""
    world, vectors = World(10), random_vectors(10)
    with pytest.raises(errors.TooFew):
        world.round(vectors, common={3: b"another model"})
    assert refusals(world) == {errors.DifferentCohorts}


def test_server_that_forges_a_client_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)
    forger = Identity.new()

    def tamper(step: int, client: int, data: bytes) -> bytes:
        if step != 1:
            return data
        cards = entries(memoryview(data)[HEADER:], CARD).tolist()
        mine = public_of(os.urandom(KEY))
        terms = world.parties[client].terms
        words = b"card" + terms.context + (7).to_bytes(4, "little") + mine + mine
        cards[7] = (7, mine, mine, forger.sign(words))
        return data[:HEADER] + listing(CARD, cards)

    with pytest.raises(errors.TooFew):
        world.round(vectors, tamper=tamper)
    assert refusals(world) == {errors.BadSignature}
    assert "client 7" in str(world.refused[0])


def test_server_that_adds_an_unknown_client_is_refused() -> None:
    world = World(10)
    stranger = World(11).selves[10]
    world.selves[10] = stranger  # its key is not in the others' list
    with pytest.raises(errors.TooFew):
        world.round(random_vectors(11))
    assert refusals(world, range(10)) == {errors.UnknownIdentity}


def test_server_that_asks_too_small_a_cohort_is_refused() -> None:
    world = World(10, Policy(least=5))
    with pytest.raises(errors.TooFew):
        world.round({i: v for i, v in random_vectors(10).items() if i < 4})

    def tamper(step: int, client: int, data: bytes) -> bytes:
        return data[: HEADER + 4 * CARD.itemsize] if step == 1 else data

    with pytest.raises(errors.TooFew):
        world.round(random_vectors(10), tamper=tamper)
    assert refusals(world) == {errors.CohortTooSmall}


def test_server_that_replays_an_old_message_is_refused() -> None:
    world, vectors = World(5), random_vectors(5)
    old = world.round(vectors)
    terms = Terms("test", (2, 0, 1), 300, 32, world.policy, 5)
    party = Party(terms, world.selves[0])
    party.advertise()
    with pytest.raises(errors.WrongRound):
        party.share(frame(1, old.terms, b""))
    with pytest.raises(errors.WrongStep):
        party.share(frame(1, terms, b""))  # a refused step is not tried again


def test_server_with_another_policy_is_refused() -> None:
    ours, theirs = Policy(), Policy(survive=0.9)
    party = Party(Terms.from_bytes(Terms("r", (2, 0, 0), 9, 32, theirs).to_bytes(), ours), World(3).selves[0])
    with pytest.raises(errors.WrongRound, match="other privacy settings"):
        Collector(Terms("r", (2, 0, 0), 9, 32, theirs)).received(0, party.advertise())


def test_damaged_share_is_refused() -> None:
    world, vectors = World(10), random_vectors(10)

    def tamper(step: int, client: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if step == 2 and client == 0 else data

    server = world.round(vectors, tamper=tamper)
    assert refusals(world) == {errors.BadShare}
    assert np.array_equal(server.opened(), plain_sum(vectors, range(1, 10)))


def test_client_that_reveals_wrong_shares_is_noticed() -> None:
    world, vectors = World(10), random_vectors(10)
    server = world.round(vectors)
    holder = min(server._shares[3])
    server._shares[3][holder] = bytes(33)
    with pytest.raises(errors.BadShare, match="client 3"):
        server.opened()


@pytest.mark.parametrize("damage", [b"", b"FSA1", b"XXXX" + bytes(50), b"FSA1\x04" + bytes(16)])
def test_bytes_that_are_no_message_are_refused_by_both_sides(damage: bytes) -> None:
    world = World(3)
    terms = Terms("r", (2, 0, 0), 9, 32, world.policy)
    with pytest.raises(errors.Refused):
        Collector(terms).received(0, damage)
    party = Party(terms, world.selves[0])
    party.advertise()
    with pytest.raises(errors.Refused):
        party.share(damage)


# Masked inputs.


def uniformity(words: np.ndarray) -> float:
    """The chi-squared statistic of the words' bytes against the uniform distribution, standardised."""
    counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float((((counts - expected) ** 2 / expected).sum() - 255) / np.sqrt(2 * 255))


def test_transcript_of_masked_inputs_is_uniform_whatever_a_client_holds() -> None:
    """Two runs differ in one client's data: all zeros or all alike. Its masked input looks the same to the test."""
    found = {}
    for value in (0, 12345):
        world, vectors = World(10), random_vectors(10, 100_000)
        vectors[4] = np.full(100_000, value, np.uint32)
        world.round(vectors)
        found[value] = [uniformity(words) for words in world.masked.values()]
        everyone = np.concatenate(list(world.masked.values()))
        assert abs(uniformity(everyone)) < 5
    assert all(abs(z) < 5 for scores in found.values() for z in scores)
    assert uniformity(np.full(100_000, 12345, np.uint32)) > 1000  # the test can fail


def test_equal_inputs_are_masked_differently() -> None:
    world = World(5)
    world.round(dict.fromkeys(range(5), np.zeros(1000, np.uint32)))
    assert len({words.tobytes() for words in world.masked.values()}) == 5


# Primitives and policy.


def test_keystream_is_the_chacha20_of_rfc_8439() -> None:
    """RFC 8439, appendix A.1, test vector 1: key, nonce and counter zero."""
    words = np.zeros(16, np.uint32)
    add_streams(words, [bytes(32)])
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert words.tobytes()[:32].hex() == expected
    add_streams(words, [], [bytes(32)])
    assert not words.any()


def test_sealed_share_opens_only_for_what_it_is_bound_to() -> None:
    box = seal(bytes(32), b"secret", b"here")
    assert unseal(bytes(32), box, b"here") == b"secret"
    with pytest.raises(errors.BadShare):
        unseal(bytes(32), box, b"there")


def test_both_ends_agree_on_a_key_and_on_another_for_another_purpose() -> None:
    a, b = os.urandom(KEY), os.urandom(KEY)
    assert agree(a, public_of(b), b"x") == agree(b, public_of(a), b"x") != agree(a, public_of(b), b"y")
    with pytest.raises(errors.BadSignature):
        agree(a, bytes(32), b"x")


@pytest.mark.parametrize("clients", [3, 10, 40, 41, 100, 300, 1000, 3000])
def test_thresholds_leave_room_for_dropouts_and_none_for_two_cohorts(clients: int) -> None:
    policy = Policy()
    k, t = policy.neighbours(clients)
    survivors, corrupt = policy.threshold(clients), int(policy.corrupt * clients)
    assert 2 * survivors > clients + corrupt  # two lists of survivors cannot both find enough signatures
    assert 1 <= t <= k < clients
    assert corrupt * k / clients < t
    assert policy.honest(clients) >= 1
    assert clients <= COMPLETE or k < clients - 1


def test_policy_without_a_majority_is_refused() -> None:
    with pytest.raises(ConfigError, match="two different cohorts"):
        Policy(survive=0.5)
    with pytest.raises(ConfigError, match="least = 2"):
        Policy(least=2)


def test_message_of_another_step_is_named() -> None:
    terms = Terms("r", (2, 0, 0), 9, 32)
    with pytest.raises(errors.Malformed, match="confirm survivors"):
        unframe(frame(1, terms), 3, terms)
