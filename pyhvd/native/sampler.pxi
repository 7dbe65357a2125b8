# Sampler: how the autotuner measures; a part of shared_memory.pyx.


cdef class Sampler:
    """Count bytes and time, batch by batch; see ``sampler.h``.

    The autotuner's thread calls :meth:`start` and :meth:`read`; the one that carries out batches calls
    :meth:`count`. The fast path counts its batches by itself.
    """

    cdef pyhvd_sampler c

    def start(self, uint32_t steps, uint64_t limit, double least):
        """Begin a sample of ``steps`` steps and ``least`` s or more; ``limit`` batches if none repeats."""
        pyhvd_sampler_start(&self.c, steps, limit, <int64_t>(least * 1e9))

    def counts(self):
        """Return whether a sample is being taken."""
        return pyhvd_sampler_counts(&self.c)

    def count(self, uint64_t nbytes, uint32_t seen):
        """Count a batch of ``nbytes``, whose most frequent tensor comes for the ``seen``-th time."""
        if pyhvd_sampler_counts(&self.c):
            pyhvd_sampler_count(&self.c, nbytes, seen)

    def read(self):
        """Return the bytes and seconds of the sample if it has ended, else None."""
        if not pyhvd_sampler_has_ended(&self.c):
            return None
        return self.c.bytes, (self.c.ended - self.c.began) / 1e9
