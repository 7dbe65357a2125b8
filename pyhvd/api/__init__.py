"""The public verbs: the names that ``import pyhvd as hvd`` gives."""
