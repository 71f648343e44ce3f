"""A real Flower deployment on loopback: processes, certificates and keys. All of it ends with the test."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

APP = Path(__file__).parent.parent.parent / "apps" / "flower"
BIN = Path(sys.executable).parent
QUICK, STOCK = "flashfl.flower.supernode", ""  # how a SuperNode is started


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(what: Callable[[], Any], seconds: float, about: str) -> Any:
    """The first true answer, or an error that says what was waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{about} did not come within {seconds} s")


class CountingProxy:
    """Passes bytes on to a port of this machine and counts them."""

    def __init__(self, port: int) -> None:
        self.up = self.down = 0
        self._to = port
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._accepts = threading.Thread(target=self._accept, daemon=True)
        self._accepts.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open.append(far)
                threading.Thread(target=self._pass, args=(near, far, "up"), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, "down"), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, which: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, which, getattr(self, which) + len(data))
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._accepts.join()
        for each in [self._listener, *self._open]:
            each.close()


class Deployment:
    """A SuperLink with TLS and SuperNode authentication, and as many SuperNodes as are started."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        home.mkdir(parents=True)
        self.env = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "FLWR_HOME": str(home), "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1",
            **(settings or {}),
        }  # fmt: skip
        make_certificates(folder)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A process in a session of its own, in a neutral folder, with a log; known by a name and its id.

        What it creates may be read by everyone, unless it takes care itself.
        """
        where = self.folder / name
        where.mkdir(exist_ok=True)
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            command,
            cwd=where,
            env={**self.env, **(env or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
            umask=0o022,
        )
        log.close()
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_from_here(self, name: str) -> None:
        """Forget what a log said so far."""
        (self.folder / f"{name}.log").write_bytes(b"")

    def superlink(self) -> None:
        """Start the SuperLink and wait until it serves, to other machines too."""
        self.start(
            "superlink", sys.executable, "-m", "flashfl.flower.superlink",
            "--host", "0.0.0.0", "--port", str(self.port),
            "--ssl-certfile", str(self.folder / "server.pem"), "--ssl-keyfile", str(self.folder / "server.key"),
            "--ssl-ca-certfile", str(self.folder / "ca.crt"), "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--database", str(self.folder / "link.db"),
        )  # fmt: skip
        wait_for(lambda: "Uvicorn running" in self.log("superlink"), 60, "the SuperLink")

    def supernode(
        self,
        number: int,
        of: int,
        via: int | None = None,
        launcher: str = QUICK,
        env: Mapping[str, str] | None = None,
        config: str = "",
    ) -> None:
        """Start a SuperNode, registered under a key of its own; `via` another port than the SuperLink's.

        config: more of the node's settings.
        """
        key = self.folder / f"node{number}.key"
        if not key.exists():
            make_key(key)
            self.flwr("supernode", "register", str(key.with_suffix(".pub")), "here")
        command = [sys.executable, "-m", launcher] if launcher else ["flower-supernode"]
        settings = f"partition-id={number} num-partitions={of} {config}".strip()
        self.start(
            f"node{number}", *command, "--superlink", f"127.0.0.1:{via or self.port}",
            "--root-certificates", str(self.folder / "ca.crt"), "--auth-supernode-private-key", str(key),
            "--port", str(free_port()), "--node-config", settings, env=env,
        )  # fmt: skip

    def flwr(self, *words: str, timeout: float = 120) -> str:
        done = subprocess.run(
            ["flwr", *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, app: Path = APP, **config: Any) -> int:
        """Submit a run; its id."""
        words = [f"{k.replace('__', '.')}={json.dumps(v)}" for k, v in config.items()]
        said = self.flwr("run", str(app), "here", "--run-config", " ".join(words), "--format", "json")
        return int(json.loads(said)["run-id"])

    def status(self, run: int) -> str:
        found = json.loads(self.flwr("list", "--run-id", str(run), "--format", "json"))
        return str(found["runs"][0]["status"])

    def wait(self, run: int, seconds: float) -> str:
        """How a run ended."""
        return str(wait_for(lambda: (s := self.status(run)).startswith("finished") and s, seconds, "the run's end"))

    def serverapp(self) -> int:
        """The process id of the running ServerApp: a descendant of the SuperLink we started."""
        return int(wait_for(lambda: next(iter(self.descendants("superlink", "flwr-serverapp")), 0), 60, "a ServerApp"))

    def descendants(self, name: str, what: str) -> list[int]:
        """Processes under one of ours whose command line has `what` in it."""
        parents, lines = {}, {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        under, grew = {self.processes[name].pid}, True
        while grew:
            more = {p for p, parent in parents.items() if parent in under} - under
            under, grew = under | more, bool(more)
        return sorted(p for p in under if what in lines.get(p, ""))

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        os.kill(self.processes[name].pid, how)
        self.processes[name].wait(30)

    def close(self) -> None:
        """End everything that was started, by its id; their children watch them and end too."""
        children = [
            p for name in self.processes if self.processes[name].poll() is None for p in self.descendants(name, "")
        ]
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@contextlib.contextmanager
def deployment(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[Deployment]:
    made = Deployment(folder, settings)
    try:
        made.superlink()
        yield made
    finally:
        made.close()


def make_key(path: Path) -> None:
    """A SuperNode's key pair: elliptic curve, as Flower wants it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    path.chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def make_certificates(folder: Path) -> None:
    """An authority and a server certificate for the loopback address."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)

    def start(subject: x509.Name, public: Any, authority: bool) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(ca_name).public_key(public)
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )  # fmt: skip

    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    ca = start(ca_name, ca_key.public_key(), True).add_extension(usage, critical=True).sign(ca_key, hashes.SHA256())
    addresses = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    own = start(name, key.public_key(), False).add_extension(addresses, critical=False).sign(ca_key, hashes.SHA256())
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(own.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
