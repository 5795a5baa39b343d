"""Handwritten digits with Keras under MultiWorkerMirroredStrategy, on workers that come and go.

    elasticrun -np 2 --tf-config examples/tf_digits.py --backup /shared/digits
    python examples/tf_digits.py                    # one worker, without elasticrun

Needs TensorFlow with Keras 2 (`pip install tensorflow-cpu tf-keras scikit-learn`), in the Python
that runs elasticrun, or in another: `elasticrun … -- /path/to/python examples/tf_digits.py`. The
data come with scikit-learn. The script does not import elastic-driver. When workers come or go, all
are started again with a new TF_CONFIG, and BackupAndRestore goes on after the last finished epoch;
the folder it writes to must be one that every host sees.

--model mnist trains the usual convolutional network for MNIST on the digits at 28 x 28 pixels, and
--model resnet a small residual network (He et al. 2016) on 32 x 32 pixels in colour.
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
    parser.add_argument("--model", choices=NETWORKS, default="small")
    parser.add_argument("--samples", type=int, help="train on so many digits (default: all 1,797)")
    parser.add_argument("--backup", default="tf-digits", help="a folder that all hosts see")
    return parser.parse_args()


def digits(
    batch_size: int, shape: tuple[int, int, int] = (8, 8, 1), samples: int | None = None
) -> tf.data.Dataset:
    """Batches of the whole world's size; the strategy gives each worker its share."""
    data = load_digits()
    images = (data.images[:samples, ..., None] / 16).astype("float32")
    images = tf.image.resize(images, shape[:2]).numpy().repeat(shape[2], axis=-1)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    whole = tf.data.Dataset.from_tensor_slices((images, data.target[:samples]))
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


def mnist() -> tf.keras.Model:
    """Two convolutions, as in most examples for MNIST."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Conv2D(32, 3, activation="relu", input_shape=(28, 28, 1)),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def resnet() -> tf.keras.Model:
    """Three stages of a residual block each; batches are normalised on each worker."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((32, 32, 3))
    found = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    for width, stride in ((8, 1), (16, 2), (32, 2)):
        before = layers.Conv2D(width, 1, strides=stride, use_bias=False)(found)
        found = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(found)
        found = layers.ReLU()(layers.BatchNormalization()(found))
        found = layers.Conv2D(width, 3, padding="same", use_bias=False)(found)
        found = layers.BatchNormalization()(found)
        found = layers.ReLU()(layers.Add()([found, before]))
    return tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(found)))


NETWORKS = {"small": network, "mnist": mnist, "resnet": resnet}


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
        model = NETWORKS[args.model]()
        model.compile(
            optimizer=tf.keras.optimizers.SGD(0.02, momentum=0.9),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    callbacks = [tf.keras.callbacks.BackupAndRestore(args.backup)]
    leads = task == {"type": "worker", "index": 0}
    if leads:
        callbacks.append(Report(workers))
    images = digits(args.batch_size, model.input_shape[1:], args.samples)
    model.fit(images, epochs=args.epochs, callbacks=callbacks, verbose=0)
    if leads:
        print(f"done after {args.epochs} epochs with {workers} workers")


if __name__ == "__main__":
    main()
