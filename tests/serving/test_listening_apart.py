"""Ports that services share, or that are taken, are refused; the error names all options at fault."""

from __future__ import annotations

import pytest

from specdec.serving.process.listening import ListenError, bound, check_apart, check_free


@pytest.mark.parametrize("hosts", [("a", "a"), ("0.0.0.0", "a"), ("a", "::")])
def test_one_port_for_two_services(hosts: tuple[str, str]) -> None:
    one, other = hosts
    with pytest.raises(ListenError, match=r"^--verifier-port 7 and --port 7: two services cannot share a port"):
        check_apart({"--verifier-port": (one, 7), "--draft-port": ("a", 8), "--port": (other, 7)})


def test_other_hosts_other_ports_and_free_ones_are_apart() -> None:
    check_apart({"a": ("127.0.0.1", 7), "b": ("10.0.0.1", 7), "c": ("127.0.0.1", 8)})
    check_apart({"a": ("127.0.0.1", 0), "b": ("127.0.0.1", 0)})


def test_all_taken_ports_are_named_in_one_error() -> None:
    with bound("127.0.0.1", 0) as one, bound("127.0.0.1", 0) as other:
        one.listen()
        other.listen()
        first, second = one.getsockname()[1], other.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^--a {first}, --b {second}: other programs listen on these ports"):
            check_free({"--a": ("127.0.0.1", first), "--free": ("127.0.0.1", 0), "--b": ("127.0.0.1", second)})
        with pytest.raises(ListenError, match=f"^--b {second}: another program listens on 127.0.0.1:{second}"):
            check_free({"--free": ("127.0.0.1", 0), "--b": ("127.0.0.1", second)})
    check_free({"--a": ("127.0.0.1", first), "--b": ("127.0.0.1", second)})


def test_another_problem_is_told_first() -> None:
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match="cannot listen there"):
            check_free({"--port": ("127.0.0.1", port), "--other-port": ("203.0.113.1", 0)})
