# What the autotuner measures with; a part of shared_memory.pyx.


cdef class Sampler:
    """Counts bytes and time, batch by batch; see ``sampler.h``.

    :meth:`start` and :meth:`read` are for the thread that wants to know, :meth:`count` for the one that
    carries out batches, unless that is the engine of a lane, which counts for itself.
    """

    cdef pyhvd_sampler c

    def start(self, uint32_t steps, uint64_t limit, double least):
        """Begin a sample: so many steps and seconds at least, or ``limit`` batches if nothing repeats."""
        pyhvd_sampler_start(&self.c, steps, limit, <int64_t>(least * 1e9))

    def counts(self):
        """Return whether a sample is being taken."""
        return pyhvd_sampler_counts(&self.c)

    def count(self, uint64_t nbytes, uint32_t seen):
        """Count a batch of so many bytes, whose most frequent tensor comes for the ``seen``-th time."""
        if pyhvd_sampler_counts(&self.c):
            pyhvd_sampler_count(&self.c, nbytes, seen)

    def read(self):
        """Return bytes and seconds of the sample if it has ended, else None."""
        if not pyhvd_sampler_has_ended(&self.c):
            return None
        return self.c.bytes, (self.c.ended - self.c.began) / 1e9
