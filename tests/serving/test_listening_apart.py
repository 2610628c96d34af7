"""Two services given one port are refused, with both options."""

from __future__ import annotations

import pytest

from specdec.serving.process.listening import ListenError, check_apart


@pytest.mark.parametrize("hosts", [("a", "a"), ("0.0.0.0", "a"), ("a", "::")])
def test_one_port_for_two_services(hosts: tuple[str, str]) -> None:
    one, other = hosts
    with pytest.raises(ListenError, match=r"^--verifier-port 7 and --port 7: two services cannot share a port"):
        check_apart({"--verifier-port": (one, 7), "--draft-port": ("a", 8), "--port": (other, 7)})


def test_other_hosts_other_ports_and_free_ones_are_apart() -> None:
    check_apart({"a": ("127.0.0.1", 7), "b": ("10.0.0.1", 7), "c": ("127.0.0.1", 8)})
    check_apart({"a": ("127.0.0.1", 0), "b": ("127.0.0.1", 0)})
