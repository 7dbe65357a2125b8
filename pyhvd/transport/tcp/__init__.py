"""Control traffic between hosts: an authenticated session, pure, and the sockets that carry it."""
