"""``python -m pyhvd doctor``.

`facts` are gathered on a host, `trial` starts `ranks` there, `advice` makes findings of both, `screen` shows
them, and `command` puts it together.
"""
