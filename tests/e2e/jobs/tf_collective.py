"""One TensorFlow task: adds 1 of every worker to a variable they mirror, and prints the sum.

START is what the variable begins with, TF_CONFIG who the others are.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = tf.Variable(float(os.environ["START"]), aggregation=tf.VariableAggregation.SUM)


@tf.function
def step() -> None:
    strategy.run(lambda: total.assign_add(1.0))  # summed over the workers by a collective


step()
print(f"total {total.numpy():g}", flush=True)
