"""Parameter blocks on servers: the published table for ResNet-50, and the rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescheduler.cluster.kinds import resnet50_blocks
from bytescheduler.cluster.parameter_blocks import assign_blocks, assign_blocks_like_mxnet
from bytescheduler.exceptions import ConfigurationError


def test_resnet50_has_the_published_157_blocks():
    blocks = resnet50_blocks()
    assert len(blocks) == 157
    assert sum(blocks) == pytest.approx(25.5e6, rel=0.01)


def test_the_published_balance_for_resnet50_on_ten_servers():
    assignment = assign_blocks(resnet50_blocks(), 10)
    assert assignment.size_difference == pytest.approx(0.1e6, abs=0.05e6)
    assert assignment.request_difference == 1
    assert assignment.requests == 157


def test_mxnets_rule_sends_the_published_247_requests_and_balances_worse():
    mxnet, ours = (f(resnet50_blocks(), 10) for f in (assign_blocks_like_mxnet, assign_blocks))
    assert mxnet.requests == 247
    assert mxnet.size_difference > 5 * ours.size_difference
    assert mxnet.imbalance > ours.imbalance


def test_a_block_above_the_average_is_cut():
    assignment = assign_blocks([100, 1, 1], 3)
    assert assignment.sizes == (34, 34, 34)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=60), st.integers(1, 12))
def test_nothing_is_lost_or_kept_twice(blocks, servers):
    for assign in (assign_blocks, assign_blocks_like_mxnet):
        kept = [0] * len(blocks)
        for server in assign(blocks, servers).parts:
            for block, size in server:
                kept[block] += size
        assert kept == blocks


@pytest.mark.parametrize(("blocks", "servers"), [([], 1), ([0], 1), ([1], 0)])
def test_impossible_input_is_refused(blocks, servers):
    with pytest.raises(ConfigurationError):
        assign_blocks(blocks, servers)
