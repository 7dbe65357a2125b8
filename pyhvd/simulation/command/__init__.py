"""``python -m pyhvd simulate``: what a training step would take on a cluster, and what would help.

``gradients.py`` makes what a step submits, from a model's name, sizes or a recording; ``cases.py`` runs
simulations, and knows which changes may help; ``main.py`` has the flags, ``screen.py`` and ``plot.py`` the
output.
"""
