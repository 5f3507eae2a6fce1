"""Where the ranks meet: what is exported wins, unless it cannot be."""

from __future__ import annotations

import pytest

from kempner.cluster.network.ports import choose_master, exported_master, given_port

NODES = ("node1", "node2")


@pytest.mark.parametrize(
    ("environ", "nodes", "address", "port", "warning"),
    [
        ({}, NODES, None, None, ""),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, NODES, None, None, ""),
        ({"MASTER_ADDR": "10.10.0.11", "MASTER_PORT": "29600"}, NODES, "10.10.0.11", 29600, ""),
        ({"MASTER_ADDR": "node1-ib"}, NODES, "node1-ib", None, ""),
        ({"MASTER_ADDR": "node1.site.edu"}, NODES, "node1.site.edu", None, ""),
        ({"MASTER_ADDR": "localhost"}, ("node1",), "localhost", None, ""),
        # Of a login shell, or of a launch on other nodes.
        ({"MASTER_ADDR": "localhost"}, NODES, None, None, "the ranks are on 2 nodes"),
        ({"MASTER_ADDR": "127.0.0.1"}, NODES, None, None, "the ranks are on 2 nodes"),
        ({"MASTER_ADDR": "node2"}, NODES, None, None, "rank 0 is on node1"),
        (
            {"MASTER_ADDR": "node2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"},
            NODES, None, None, "",
        ),
    ],
)  # fmt: skip
def test_what_is_exported_wins_unless_rank_0_cannot_be_there(
    environ: dict[str, str],
    nodes: tuple[str, ...],
    address: str | None,
    port: int | None,
    warning: str,
) -> None:
    said = exported_master(environ, nodes)
    assert (said.address, said.port) == (address, port)
    ignored = f"MASTER_ADDR={environ.get('MASTER_ADDR')} is ignored: {warning}"
    assert said.warning == (ignored if warning else "")
    chosen, on = choose_master(environ, nodes, "salt")
    assert chosen == (address or "node1")
    assert on == (port or choose_master({}, nodes, "salt")[1])
    assert given_port(said.variables()) == port


@pytest.mark.parametrize("port", ["0", "65536", "abc", "-1", "29600 "])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(ValueError, match=f"MASTER_PORT={port} in the environment is not a port"):
        exported_master({"MASTER_PORT": port}, NODES)
