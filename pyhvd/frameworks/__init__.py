"""What the adapters of frameworks with compiled graphs share: calls by key, their doors, names and errors.

A *graph call* is one collective of a compiled graph, with what is fixed when the graph is traced. A *door* is
the way by which a running graph submits it: ``native``, an extension that the framework calls without Python,
or ``callback``, the framework's own callback into Python.
"""
