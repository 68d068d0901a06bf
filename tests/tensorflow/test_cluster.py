"""TF_CONFIG and launchers' variables: what is read, and what is refused with a remedy."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("tensorflow")

from bytescheduler.exceptions import ConfigurationError, UsageError
from bytescheduler.tensorflow.cluster import Cluster, read_cluster
from bytescheduler.tensorflow.servers import refuse_wrong_order

HOSTS = ["a:1", "b:2", "c:3"]
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def tf_config(cluster: object, kind: str = "worker", index: object = 0) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_nothing_set_is_no_cluster() -> None:
    assert read_cluster({}) is None


def test_workers_are_ranks() -> None:
    cluster = read_cluster(tf_config({"worker": HOSTS}, index=2))
    assert cluster == Cluster(addresses=tuple(HOSTS), rank=2)
    assert cluster.task(1) == "/job:worker/replica:0/task:1"


def test_the_chief_is_rank_0() -> None:
    jobs = {"chief": HOSTS[:1], "worker": HOSTS[1:]}
    worker, chief = read_cluster(tf_config(jobs, index=1)), read_cluster(tf_config(jobs, "chief"))
    assert worker is not None
    assert chief is not None
    assert (worker.rank, chief.rank, worker.world_size) == (2, 0, 3)
    assert worker.task(0) == "/job:chief/replica:0/task:0"
    assert worker.task(2) == "/job:worker/replica:0/task:1"


@pytest.mark.parametrize(
    ("environment", "rule"),
    [
        ({"TF_CONFIG": "{"}, "must be JSON"),
        ({"TF_CONFIG": "[1]"}, "must be JSON"),
        ({"TF_CONFIG": "{}"}, "must be JSON"),
        (tf_config({"worker": HOSTS}, index=3), "worker:3 is not in the cluster"),
        (tf_config({"worker": HOSTS}, index=-1), "is not in the cluster"),
        (tf_config({"worker": HOSTS}, "evaluator"), "is not in the cluster"),
        (tf_config({"worker": HOSTS, "ps": ["d:4"]}), r"not \['ps'\]"),
        (tf_config({"worker": ["a:1", "a:1"]}), "address"),
        (tf_config({"worker": ["a", "b:1"]}), "host:port"),
        (tf_config({"worker": ["a:1", "b:99999"]}), "host:port"),
        (tf_config({"worker": HOSTS}, index="x"), "must be JSON"),
    ],
)
def test_a_wrong_tf_config_is_refused(environment: dict[str, str], rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule) as caught:
        read_cluster(environment)
    assert "TF_CONFIG" in str(caught.value)


def test_torchrun_on_one_host() -> None:
    cluster = read_cluster(TORCHRUN)
    assert cluster == Cluster(addresses=("127.0.0.1:29501", "127.0.0.1:29502"), rank=1)


def test_horovodrun_on_one_host() -> None:
    cluster = read_cluster(
        {
            "HOROVOD_RANK": "0",
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
        }
    )
    assert cluster == Cluster(addresses=("127.0.0.1:4001", "127.0.0.1:4002"), rank=0)


def test_tf_config_goes_before_the_launcher() -> None:
    cluster = read_cluster({**TORCHRUN, **tf_config({"worker": HOSTS})})
    assert cluster is not None
    assert cluster.world_size == 3


def test_a_launcher_on_several_hosts_needs_tf_config() -> None:
    with pytest.raises(ConfigurationError, match="set TF_CONFIG on every worker"):
        read_cluster({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"})


def test_a_launcher_variable_that_is_no_number() -> None:
    with pytest.raises(ConfigurationError, match="RANK"):
        read_cluster({**TORCHRUN, "RANK": "first"})


@pytest.mark.parametrize("modules", [["os", "tensorflow"], ["tensorflow", "keras", "mxnet"]])
def test_parameter_servers_are_refused_where_mxnet_would_crash(modules: list[str]) -> None:
    with pytest.raises(UsageError, match=r"import bytescheduler\.tensorflow before tensorflow"):
        refuse_wrong_order(modules)


def test_parameter_servers_are_allowed_where_mxnet_came_first() -> None:
    refuse_wrong_order(["mxnet", "tensorflow", "keras"])
