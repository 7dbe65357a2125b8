"""The commits of an elastic job: the vault on each host, and the store outside of the hosts."""
