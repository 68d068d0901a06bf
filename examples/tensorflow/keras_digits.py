"""A Keras CNN on scikit-learn's digits, trained by several workers.

Run it on every worker with TF_CONFIG set, or on one machine::

    torchrun --nproc-per-node 2 keras_digits.py

(or ``horovodrun -np 2 python keras_digits.py``). ``--transport kvstore`` sends gradients over
MXNet's parameter server instead, with the ``DMLC_*`` variables set.
"""

from __future__ import annotations

import argparse

import bytescheduler.tensorflow as bs  # before TensorFlow and Keras

# isort: split
import keras
import numpy as np
from sklearn.datasets import load_digits


def make_model() -> keras.Model:
    """A small convolutional network."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Train; rank 0 reports the accuracy on held-out digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    parser.add_argument("--transport", default="tensorflow")
    args = parser.parse_args()

    keras.utils.set_random_seed(1)
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    held_out = len(images) // 5

    model = make_model()
    optimizer = bs.ScheduledOptimizer(keras.optimizers.AdamW(1e-3), model, transport=args.transport)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    size = (len(images) - held_out) // optimizer.world_size  # as many steps on every worker
    share = slice(held_out + optimizer.rank * size, held_out + (optimizer.rank + 1) * size)
    model.fit(
        images[share],
        digits.target[share],
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2 if optimizer.rank == 0 else 0,
    )
    _, accuracy = model.evaluate(images[:held_out], digits.target[:held_out], verbose=0)
    if optimizer.rank == 0:
        print(f"accuracy {accuracy:.3f} with {optimizer.world_size} workers")
    optimizer.close()


if __name__ == "__main__":
    main()
