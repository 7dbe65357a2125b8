"""pyhvd.keras with Keras's backend jax, on two ranks."""

from tests.frameworks.keras_on_ranks import make_tests

globals().update(make_tests("jax"))
