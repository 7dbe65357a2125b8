"""The hosts that users and clusters give, and the commands that reach them."""
