"""Parts of the kvstore transport that need neither MXNet's servers nor processes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bytescheduler._dmlc import require_variables
from bytescheduler._server_optimizer import ServerOptimizer
from bytescheduler.exceptions import ConfigurationError, TransportError
from bytescheduler.transports._kvstore_keys import (
    PIECE_SIZE,
    STRIPES,
    KeySpace,
    piece_lengths,
)
from bytescheduler.transports.base import MESSAGE_LIMIT

JOB = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_SERVER": "2",
    "DMLC_NUM_WORKER": "3",
}


@pytest.mark.parametrize("name", sorted(JOB))
@pytest.mark.parametrize("value", ["", "0x", "-1", None])
def test_a_wrong_or_missing_variable_is_named(name, value):
    environ = {key: text for key, text in JOB.items() if key != name}
    if value is not None:
        environ[name] = value
    if name == "DMLC_PS_ROOT_URI" and value:
        assert require_variables(environ).host == value
        return
    with pytest.raises(ConfigurationError, match=name):
        require_variables(environ)


def test_another_role_than_the_wanted_one_is_named():
    with pytest.raises(ConfigurationError, match="DMLC_ROLE must be worker here, got 'server'"):
        require_variables({**JOB, "DMLC_ROLE": "server"}, role="worker")


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
def test_keys_live_where_mxnet_hashes_them_and_never_overflow(servers):
    keys = KeySpace(servers, 0)
    for _ in range(200):
        key = keys.take(10, "float32", 40)
        assert key.number * 9973 % servers == key.server
        assert key.number * 9973 < 1 << 31


def test_pieces_spread_evenly_by_bytes_then_by_count():
    rng = random.Random(1)
    keys = KeySpace(3, 0)
    for _ in range(300):
        nbytes = rng.choice([64, 4096, PIECE_SIZE])
        keys.take(nbytes // 4, "float32", nbytes)
    carried = [nbytes for nbytes, _ in keys.load]
    assert max(carried) - min(carried) <= PIECE_SIZE


def test_a_new_cut_takes_the_same_keys_again():
    keys = KeySpace(2, 0)
    first = [keys.take(256, "float32", 1024).number for _ in range(10)]
    keys.begin_cut()
    second = [keys.take(256, "float32", 1024) for _ in range(10)]
    assert [key.number for key in second] == first
    assert not any(key.fresh for key in second)


def test_stripes_do_not_share_keys_and_end_with_an_error():
    taken = [
        {KeySpace(2, stripe).take(1, "float32", 4).number for _ in range(1)}
        for stripe in range(STRIPES)
    ]
    assert len(set.union(*taken)) == STRIPES
    keys = KeySpace(64, 0)
    for _ in range(100):
        keys.reserve(0)
    with pytest.raises(TransportError, match="larger partition sizes"):
        [keys.reserve(0) for _ in range(1000)]


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("elements", [0, 1, 1000, PIECE_SIZE, 3 * PIECE_SIZE + 1])
def test_pieces_cover_a_chunk(elements, itemsize):
    lengths = piece_lengths(elements, itemsize)
    assert sum(lengths) == elements
    assert all(0 < length * itemsize <= PIECE_SIZE for length in lengths)


def test_messages_survive_a_sum_with_zeros_in_float32():
    channel = pytest.importorskip("bytescheduler.transports._kvstore_channel")
    rng = random.Random(2)
    for length in (0, 1, MESSAGE_LIMIT):
        message = [rng.randint(-(2**63), 2**63 - 1) for _ in range(length)]
        buffer = np.zeros(channel.LENGTH, np.float32)
        channel.encode(channel.DATA, message, buffer)
        assert channel.decode(buffer + np.zeros_like(buffer)) == (channel.DATA, message)


class Plain:
    """An optimizer that notes what it was given."""

    multi_precision = False

    def __init__(self) -> None:
        self.lr_mult = {3: 0.5}
        self.wd_mult: dict[int, float] = {}
        self.updated: list[int] = []

    def create_state_multi_precision(self, index, weight):
        return f"state of {index}"

    def update_multi_precision(self, index, weight, grad, state):
        self.updated.append(index)


class Held:
    """What a server holds."""

    def copyto(self, other):
        other.received = self


def test_servers_update_pieces_and_keep_messages_as_they_are():
    plain = Plain()
    optimizer = ServerOptimizer(plain, {70_000: 3})
    held, pushed = Held(), Held()
    assert optimizer.create_state_multi_precision(70_000, held) == "state of 70000"
    assert optimizer.create_state_multi_precision(70_001, held) is None
    optimizer.update_multi_precision(70_000, held, pushed, None)
    optimizer.update_multi_precision(5, held, pushed, None)
    assert plain.updated == [70_000, 5]
    optimizer.update_multi_precision(70_001, held, pushed, None)
    assert held.received is pushed
    assert plain.lr_mult[70_000] == 0.5
