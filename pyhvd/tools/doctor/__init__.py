"""``python -m pyhvd doctor``.

`facts` gathers the facts of a host, `trial` starts `ranks` on it, `advice` derives findings from both,
`screen` shows them, and `command` is the entry point.
"""
