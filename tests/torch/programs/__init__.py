"""Programs of the shape of Horovod's examples, which import ``horovod`` and check themselves."""
