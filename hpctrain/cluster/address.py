"""Which of a node's addresses other nodes reach."""

from __future__ import annotations

import socket

import psutil


def own_names() -> set[str]:
    """Every name and address of this node: of its interfaces, and what its own host name leads to."""
    host = socket.gethostname()
    names = {host, host.split(".")[0], "localhost", socket.getfqdn(), *resolve(host)}
    for addresses in psutil.net_if_addrs().values():
        names |= {a.address.split("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)}
    return names


def resolve(name: str) -> set[str]:
    """The addresses that a name stands for here; none when it cannot be resolved."""
    try:
        return {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        return set()
