"""The process of a rank: it receives what to call, runs it, and sends the result."""
