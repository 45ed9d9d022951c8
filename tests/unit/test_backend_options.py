"""Which options of --backend-option go to which backend."""

import pytest

from kvxfer.bench import _backend_options
from kvxfer.errors import UsageError


def test_a_bare_name_is_every_backend_s_that_moves_data() -> None:
    assert _backend_options(["threads=3"], ["shm", "cma", "null"]) == {
        "shm": {"threads": 3},
        "cma": {"threads": 3},
        "null": {},
    }


def test_a_name_with_a_backend_is_that_one_s_alone_and_the_later_one_counts() -> None:
    options = _backend_options(["threads=3", "shm.threads=1", "tcp.connections = 4"], ["tcp", "shm"])
    assert options == {"tcp": {"threads": 3, "connections": 4}, "shm": {"threads": 1}}


def test_values_with_names() -> None:
    assert _backend_options(["ucx.errors=none", "ucx.pull=GET", "pool=1"], ["ucx"]) == {
        "ucx": {"errors": 1, "pull": 1, "pool": 1}
    }
    with pytest.raises(UsageError, match="choose from peer, none"):
        _backend_options(["ucx.errors=some"], ["ucx"])


@pytest.mark.parametrize("text", ["threads", "=3", ".threads=3", "shm.=3", "shm.threads=x", "threads=-1", "ucx.tls=1"])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--backend-option"):
        _backend_options([text], ["tcp", "shm"])
