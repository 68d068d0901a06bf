"""Wrong uses that need a process of their own: ``refused_worker.py OUTPUT`` writes a verdict each.

TensorFlow is started before ``bytescheduler.tensorflow`` is imported, under a ``TF_CONFIG`` of two
workers, and has two logical devices for a strategy to distribute over.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

(CPU,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 2)
tf.zeros(1)  # starts the runtime

import checks  # noqa: E402

import bytescheduler.tensorflow as bs  # noqa: E402
from bytescheduler.exceptions import UsageError  # noqa: E402

STRATEGIES = {
    "two replicas": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "one replica": tf.distribute.OneDeviceStrategy("CPU:0"),
}


def refused(call: Callable[[], Any], words: str) -> None:
    checks.raises(UsageError, call, words)


def late_import() -> None:
    def wrap() -> Any:
        return bs.ScheduledOptimizer(checks.ko.SGD(0.1), checks.dense())

    refused(wrap, "before the first tensor, variable or model is made")
    refused(bs.rank, "import bytescheduler.tensorflow")


def wrapped_in_a_scope(strategy: Any) -> None:
    model, optimizer = checks.dense(), checks.ko.SGD(0.1)
    with strategy.scope():
        refused(lambda: checks.alone(optimizer, model), "outside of strategy.scope")
    checks.alone(optimizer, model).close()


def model_of_a_scope(strategy: Any) -> None:
    with strategy.scope():
        model = checks.dense()
    refused(lambda: checks.alone(checks.ko.SGD(0.1), model), "the model was made in the scope of a")


def optimizer_of_a_scope(strategy: Any) -> None:
    with strategy.scope():
        optimizer = checks.ko.SGD(0.1)
    refused(lambda: checks.alone(optimizer, checks.dense()), "the optimizer was made in the scope")


def trained_in_a_scope(strategy: Any) -> None:
    model = checks.dense()
    optimizer = checks.alone(checks.ko.SGD(0.1), model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)

    def fit() -> None:
        with strategy.scope():
            model.fit(checks.X, checks.Y, verbose=0)

    refused(fit, "a tf.distribute strategy is active")
    refused(lambda: strategy.run(lambda: checks._mse_step(model, optimizer)), "strategy is active")
    model.fit(checks.X, checks.Y, verbose=0)
    optimizer.close()


def main(output: str) -> None:
    verdicts = {"late import": verdict(late_import)}
    for name, strategy in STRATEGIES.items():
        for check in (
            wrapped_in_a_scope,
            model_of_a_scope,
            optimizer_of_a_scope,
            trained_in_a_scope,
        ):
            verdicts[f"{check.__name__}, {name}"] = verdict(lambda c=check, s=strategy: c(s))
    Path(output).write_text(json.dumps(verdicts))


def verdict(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return "ok"


if __name__ == "__main__":
    main(sys.argv[1])
