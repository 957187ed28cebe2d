"""Names of this machine."""

import ipaddress


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
