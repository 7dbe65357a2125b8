"""The folder that ``pyhvdrun --as-horovod`` appends to ``sys.path``: it has ``horovod`` alone."""
