"""Names and addresses of this machine."""

import ipaddress
import os
import socket
from contextlib import suppress

from birl.errors import BirlError


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine itself. Another name that resolves to it may be that of a web page."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    name = name.removesuffix(".")
    return is_loopback(name) or name.endswith(".localhost")


def own_address(host: str) -> str:
    """The local address at which `host` reaches this process. Raises `OSError` if there is no route."""
    if is_loopback(host):
        return "::1" if ":" in host else "127.0.0.1"
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asks:
        asks.connect(place)  # sends nothing
        return asks.getsockname()[0]


def interface(host: str) -> str:
    """Network interface by which `host` reaches this process over IPv4; empty for the loopback, or if it is unknown."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        import fcntl

        own, address_of = own_address(host), 0x8915  # SIOCGIFADDR of Linux
        for _, name in () if is_loopback(own) else socket.if_nameindex():
            with suppress(OSError):  # has no address
                if socket.inet_ntoa(fcntl.ioctl(asks, address_of, name.encode().ljust(40, b"\0"))[20:24]) == own:
                    return name
    return ""


def token_for(host: str) -> str:
    """BIRL_TOKEN, of a server at this host; it may be empty on the loopback. Raises `BirlError`."""
    token = os.environ.get("BIRL_TOKEN", "")
    if not is_loopback(host) and not token:
        raise BirlError(
            f"host={host}: others could reach the server, so it needs a token: set the environment variable "
            "BIRL_TOKEN, or leave host at 127.0.0.1."
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise BirlError("BIRL_TOKEN must be made of ASCII letters, digits and signs, without spaces.")
    return token


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: the system refuses connections until then. Raises `BirlError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # with proto 0 asyncio leaves Nagle on: 40 ms
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, ValueError) as error:  # an invalid name is a ValueError
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise BirlError(f"host={host} port={port}: cannot be taken ({reason}).") from error
    return sock
