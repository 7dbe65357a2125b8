"""What ``import horovod`` finds at run time: pyhvd under Horovod's module names."""
