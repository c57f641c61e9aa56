"""Which network interface of a host reaches the other ranks.

gloo and NCCL guess it from the host's name otherwise; where that resolves to 127.0.0.1, as it does on Debian, the
ranks wait for minutes and then fail.
"""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from ds_bert.errors import UserError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

# Interfaces of containers and virtual machines on a host: their addresses mean nothing to other hosts.
BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "podman")


def free_port() -> int:
    """A TCP port that nothing on this host listens at."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def is_loopback(address: str) -> bool:
    """Whether an address or a name means this host only to itself."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        return False


def source_address(towards: str) -> str:
    """The address this host sends from when it sends to another. Nothing is sent.

    Raises:
        UserError: there is no route, or the name does not resolve.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()}: no way to {towards}: {error.strerror or error}; check its name and the network"
        ) from None


def address_of_this_host() -> str:
    """An address by which other hosts reach this one: of the interface with the default route, else of any other."""
    try:
        # A documentation address (RFC 5737): any that only the default route reaches.
        address = source_address("192.0.2.1")
        if not ipaddress.ip_address(address).is_loopback:
            return address
    except UserError:
        pass
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            is_ipv4 = entry.family == socket.AF_INET and not entry.address.startswith("127.")
            if is_ipv4 and not name.startswith(BRIDGES):
                return entry.address
    raise UserError(f"{socket.gethostname()}: has no network address but the loopback's; set MASTER_ADDR")


def interface_towards(master: str) -> str:
    """The name of the interface by which this host reaches the master; on the master itself that of its address."""
    address = address_of_this_host() if is_loopback(master) else source_address(master)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise UserError(f"{socket.gethostname()}: no network interface has the address {address}")


def interface_environment(master: str, *, one_host: bool, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that make gloo and NCCL use the right interface; those that the user set stay as they are."""
    if one_host and is_loopback(master):
        return {} if GLOO in env else {GLOO: "lo"}
    missing = [name for name in (GLOO, NCCL) if name not in env]
    if not missing:
        return {}
    name = interface_towards(master)
    return dict.fromkeys(missing, name)
