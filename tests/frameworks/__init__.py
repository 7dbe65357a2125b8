"""Arrays of JAX, TensorFlow and Keras; needs all three."""
