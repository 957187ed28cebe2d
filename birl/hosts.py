"""Names and addresses of this machine."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_name(host: str) -> bool:
    """Does a header Host name the machine itself? Another name that leads here may be that of a web page."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    name = name.removesuffix(".")
    return is_loopback(name) or name.endswith(".localhost")


def addressed(name: str) -> bool:
    """Is a model, a teacher, a judge, a tool or a picture behind an address?"""
    return name.startswith(("http://", "https://"))


def is_address(text: str) -> bool:
    """http:// or https://, a host, and a port that can be."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port beyond 65535
        return False
    return known and text.isprintable() and " " not in text
