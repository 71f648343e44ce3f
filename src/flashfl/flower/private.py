"""Private rounds on Flower: the node's half, with its identity key.

A node that takes part in secure rounds has two settings. `identity`: the file of its private key. `identities`: the
file with every client's public key, which must not come from the server. `python -m flashfl.flower.private` makes both.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecord, Context

from ..core.errors import ConfigError
from ..core.parts import build
from ..data.sources import Source
from ..engine.client import ClientSide, Reply
from ..engine.memory import Rounds
from ..engine.party import Drawer, PrivateSide
from ..privacy.keys import MAKE_KEYS, Directory, Identity
from ..privacy.policy import Policy

_STATE = "flashfl.private"  # the name of our record in a context's state


def answer(context: Context, side: ClientSide, client: int, data: Source, request: bytes, memory: Rounds) -> Reply:
    """A node's answer to a request of a private round."""
    config = context.node_config
    policy = {name.removeprefix("policy-"): value for name, value in config.items() if name.startswith("policy-")}
    secure = "identity" in config  # it takes part in secure rounds, and in no others
    if secure:
        if "identities" not in config:
            raise ConfigError(
                "the node's settings have `identity`, but not `identities`: add the file with all clients' public keys "
                'to --node-config, such as identities="keys/identities.json"'
            )
        identity = read_identity(Path(str(config["identity"])))
        directory = Directory.read(Path(str(config["identities"])))
    else:  # without masks nobody signs anything; a secure round finds that its key is unknown
        identity, directory = Identity.new(), Directory({})
    drawer = cast(Drawer, context.state.config_records.setdefault(_STATE, ConfigRecord()))  # stays on its node
    own = PrivateSide(side, client, drawer, build(Policy, policy, "policy"), identity, directory, secure)
    return own.answer(data, request, memory)


def read_identity(path: Path) -> Identity:
    try:
        return Identity(bytes.fromhex(path.read_text().strip()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the identity key {path} ({error}): expected 64 hex digits. {MAKE_KEYS}"
        ) from None


def make_identity(client: int, folder: Path) -> str:
    """Write a new private key that only this user can read. Returns the public key in hex."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity.new()
    with os.fdopen(os.open(folder / f"client-{client}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(identity.private.hex())
    return identity.public.hex()


def main() -> None:
    about = (
        "Make identity keys for secure aggregation: a private key for each client, and identities.json with the "
        "public keys. In a deployment, every client makes its own key. A party that all clients trust, other than the "
        "server, collects the public keys in one identities.json."
    )
    asked = argparse.ArgumentParser(prog="python -m flashfl.flower.private", description=about)
    asked.add_argument("folder", type=Path, help="folder to write the keys to")
    asked.add_argument("clients", type=int, nargs="+", help="client ids, such as 0 1 2")
    given = asked.parse_args()
    clients = sorted(set(given.clients))
    for client in clients:
        if (key := given.folder / f"client-{client}.key").exists():
            raise SystemExit(
                f"error: {key} exists already, and nothing was written. Leave out client {client}, or remove this file "
                "to give it a new key."
            )
    try:
        path = given.folder / "identities.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        known |= {str(client): make_identity(client, given.folder) for client in clients}
        path.write_text(json.dumps(known, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    count = len(clients)
    print(f"wrote {count} private key{'s' * (count != 1)} and {path}")


if __name__ == "__main__":
    main()
