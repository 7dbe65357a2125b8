"""The hosts that users and clusters give, and what reaches them."""
