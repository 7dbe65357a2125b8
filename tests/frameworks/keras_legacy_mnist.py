"""A program for Horovod and Keras 2, written as Horovod's examples are; horovodrun starts it on 2 ranks."""

from __future__ import annotations

import os
import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

folder = sys.argv[1]
hvd.init()
random = np.random.default_rng(hvd.rank())
labels = random.integers(0, 10, 256)
images = np.eye(64)[labels * 6].reshape(-1, 8, 8, 1) + random.normal(scale=0.1, size=(256, 8, 8, 1))
dataset = tf.data.Dataset.from_tensor_slices((tf.cast(images, tf.float32), tf.cast(labels, tf.int64)))
dataset = dataset.repeat().shuffle(1000).batch(32)

mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu", input_shape=(8, 8, 1)),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.005 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
mnist_model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(os.path.join(folder, "checkpoint-{epoch}.h5")))
verbose = 1 if hvd.rank() == 0 else 0
history = mnist_model.fit(
    dataset, steps_per_epoch=16 // hvd.size(), callbacks=callbacks, epochs=6, verbose=verbose
)

assert abs(tf.keras.backend.get_value(mnist_model.optimizer.lr) - scaled_lr) < 1e-7
losses, weights = history.history["loss"], mnist_model.get_weights()
assert losses[-1] < 0.5 * losses[0], losses
everyone = hvd.allgather_object((losses, weights))
for other_losses, other_weights in everyone:
    assert np.allclose(losses, other_losses, rtol=1e-6)
    for mine, other in zip(weights, other_weights, strict=True):
        np.testing.assert_array_equal(mine, other)
hvd.broadcast_object(None)  # rank 0 has written its file
loaded = hvd.load_model(os.path.join(folder, "checkpoint-6.h5"))
assert loaded.optimizer.iterations.numpy() == mnist_model.optimizer.iterations.numpy()
for mine, other in zip(weights, loaded.get_weights(), strict=True):
    np.testing.assert_array_equal(mine, other)
loaded.fit(dataset, steps_per_epoch=2, epochs=1, verbose=0)
first, second = hvd.allgather_object(loaded.get_weights())
assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
print(f"rank {hvd.rank()} ended")
