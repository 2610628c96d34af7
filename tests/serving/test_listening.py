"""If a server cannot listen, the error names the option."""

from __future__ import annotations

import errno
import socket

import pytest

from specdec.serving.process.listening import ListenError, bound


def test_a_free_port_can_be_had_and_is_given_back() -> None:
    with bound("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
    bound("127.0.0.1", port).close()


def test_a_shared_port_may_have_several_who_share_it() -> None:
    with bound("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        bound("127.0.0.1", port, shared=True).close()
        first.listen()
        with pytest.raises(ListenError, match=f"^--port {port}: another program listens on 127.0.0.1:{port}: "):
            bound("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 70, "::"])
@pytest.mark.parametrize(("option", "named"), [("--port", "--host"), ("--draft-port", "--draft-host")])
def test_a_host_that_is_not_ours(host: str, option: str, named: str) -> None:
    with pytest.raises(ListenError, match=f"^{named} {host}: cannot listen there .*0.0.0.0 for all interfaces$"):
        bound(host, 0, option=option)


def test_a_port_that_only_root_may_have() -> None:
    error = PermissionError(errno.EACCES, "Permission denied")
    assert str(ListenError.of("127.0.0.1", 80, error)) == (
        "--port 80: this user may not listen on 127.0.0.1:80: give a port of at least 1024"
    )


def test_what_was_looked_at_is_closed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ListenError):  # an unclosed socket would warn, and fail the test
            bound("127.0.0.1", taken.getsockname()[1])
