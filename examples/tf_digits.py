"""Handwritten digits with Keras under MultiWorkerMirroredStrategy, on workers that come and go.

    elasticrun -np 2 --tf-config examples/tf_digits.py --backup /shared/digits
    python examples/tf_digits.py                    # one worker, without elasticrun

Needs TensorFlow with Keras 2 (`pip install tensorflow-cpu tf-keras scikit-learn`), in the Python
that runs elasticrun, or in another: `elasticrun … -- /path/to/python examples/tf_digits.py`. The
data come with scikit-learn. The script does not import elastic-driver. When workers come or go, all
are started again with a new TF_CONFIG, and BackupAndRestore goes on after the last finished epoch;
the folder it writes to must be one that every host sees.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Keras 3 does not fit under this strategy
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from sklearn.datasets import load_digits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="samples a step, in all")
    parser.add_argument("--backup", default="tf-digits", help="a folder that all hosts see")
    return parser.parse_args()


def digits(batch_size: int) -> tf.data.Dataset:
    """Batches of the whole world's size; the strategy gives each worker its share."""
    data = load_digits()
    images = (data.images[..., None] / 16).astype("float32")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    whole = tf.data.Dataset.from_tensor_slices((images, data.target))
    shuffled = whole.shuffle(len(images), seed=0)
    return shuffled.batch(batch_size, drop_remainder=True).with_options(options)


def network() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=(8, 8, 1)),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


class Report(tf.keras.callbacks.Callback):
    """A line for each finished epoch, from one worker."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        scores = logs or {}
        what = f"loss {scores['loss']:.4f} accuracy {scores['accuracy']:.1%}"
        print(f"epoch {epoch} {what} workers {self.workers}", flush=True)


def main() -> None:
    args = arguments()
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    task = config.get("task", {"type": "worker", "index": 0})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # meets the others named in TF_CONFIG
    workers = strategy.num_replicas_in_sync
    with strategy.scope():
        model = network()
        model.compile(
            optimizer=tf.keras.optimizers.SGD(0.02, momentum=0.9),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    callbacks = [tf.keras.callbacks.BackupAndRestore(args.backup)]
    leads = task == {"type": "worker", "index": 0}
    if leads:
        callbacks.append(Report(workers))
    model.fit(digits(args.batch_size), epochs=args.epochs, callbacks=callbacks, verbose=0)
    if leads:
        print(f"done after {args.epochs} epochs with {workers} workers")


if __name__ == "__main__":
    main()
