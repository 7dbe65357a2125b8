# Agreement: the other hosts, for a rank's end of the ready table; a part of shared_memory.pyx.

cdef int MOST_DELEGATED = 1024  # slots in one list, so that its encoding is not too long


cdef class Agreement:
    """A rank's view of the agreement between its host and the others.

    Parameters
    ----------
    rank : int
        This rank.
    hosts : sequence of sequence of int
        The ranks of each host, ascending.
    parents : sequence of int
        The parent of each host in the tree of hosts; -1 for the tops.
    connections : sequence of int
        By host, the descriptor of the connected, non-blocking socket that the ranks of both hosts share;
        -1 for a host that is no neighbour.
    bells, background_bells : sequence of int
        By local rank, descriptors of eventfds: for a thread that waits, and for the background thread.
    """

    cdef pyhvd_agreement c
    cdef list hosts
    cdef dict places  # {rank: (its host, its number there)}
    # To be announced; no value is empty:
    cdef dict recalled  # {set: bits}
    cdef dict delegated  # {set: {slot: version}}

    def __cinit__(self, int rank, hosts, parents, connections, bells, background_bells):
        self.hosts = [list(each) for each in hosts]
        self.places = {r: (h, q) for h, ranks in enumerate(self.hosts) for q, r in enumerate(ranks)}
        self.recalled, self.delegated = {}, {}
        init_tree(&self.c.tree, self.places[rank][0], parents)
        self.c.messages = -1
        for host, fd in enumerate(connections):
            self.c.fds[<int>host] = fd
        for q, each in enumerate(self.hosts[self.c.tree.host]):
            self.c.ranks[<int>q] = each
            self.c.progress_bells[<int>q] = bells[q]
            self.c.background_bells[<int>q] = background_bells[q]

    cdef bint spans(self, ranks) except -1:
        """Return whether a set has ranks on every host."""
        return len({self.places[rank][0] for rank in ranks}) == len(self.hosts)

    cdef bint serves(self, ranks) except -1:
        """Return whether a set can agree here: it has ranks on one host, or on all."""
        return self.spans(ranks) or len({self.places[rank][0] for rank in ranks}) == 1

    cdef bint tells_last_rank(self, int host) except -1:
        """Return whether an announcement of another host is that of one rank: it stands for no other host."""
        is_flat = self.c.tree.tops == self.c.tree.hosts
        return is_flat and host != <int>self.c.tree.host and len(self.hosts[host]) == 1

    cdef int note_recall(self, int set_id, bits) except -1:
        cdef dict fresh = self.delegated.get(set_id, {})
        self.drop_delegated(set_id, [slot for slot in fresh if bits >> slot & 1])
        if bits:
            self.recalled[set_id] = self.recalled.get(set_id, 0) | bits
        return 0

    cdef int drop_delegated(self, int set_id, slots) except -1:
        for slot in slots:
            del self.delegated[set_id][slot]
        if not self.delegated.get(set_id, True):
            del self.delegated[set_id]
        return 0

    cdef bint announce(self, pyhvd_ready_table* table, uint64_t number, audience) except -1:
        """Announce what was noted, and a response list (0: none); return False if there is no room now."""
        recalled, delegated = self.next_part()
        while recalled != self.recalled or delegated != self.delegated:
            if not self.announce_part(table, 0, 0, recalled, delegated):
                return False
            recalled, delegated = self.next_part()
        if not (number or recalled or delegated):
            return True
        return self.announce_part(table, number, audience, recalled, delegated)

    cdef tuple next_part(self):
        """Return what one list can recall, and then delegate: ORDER_RANGES ranges, MOST_DELEGATED slots."""
        cdef int ranges = ORDER_RANGES, left = MOST_DELEGATED
        cdef dict recalled = {}, delegated = {}
        for set_id, bits in self.recalled.items():
            for part in in_ranges(bits)[:ranges]:
                recalled[set_id] = recalled.get(set_id, 0) | part
                ranges -= 1
        for set_id, fresh in self.delegated.items():
            for part in in_ranges(sum(1 << slot for slot in sorted(fresh)[:left]))[:ranges]:
                chosen = {slot: version for slot, version in fresh.items() if part >> slot & 1}
                delegated.setdefault(set_id, {}).update(chosen)
                ranges -= 1
                left -= len(chosen)
        return recalled, delegated

    cdef bint announce_part(
        self, pyhvd_ready_table* table, uint64_t number, audience, dict recalled, dict delegated
    ) except -1:
        cdef OrderList announced = OrderList(number, audience, recalled, delegated)
        cdef int written
        with nogil:
            written = pyhvd_agreement_announce_list(table, &announced.c)
        if written:
            left = {set_id: bits & ~recalled.get(set_id, 0) for set_id, bits in self.recalled.items()}
            self.recalled = {set_id: bits for set_id, bits in left.items() if bits}
            for set_id, slots in delegated.items():
                self.drop_delegated(set_id, slots)
        return written != 0

    cdef dict look(self, pyhvd_ready_table* table, int set_id):
        """Return, by rank of another host, the slots that all ranks of its host have marked; on host 0."""
        step = table.words * 8
        cdef bytearray announced = bytearray(step * len(self.hosts))
        cdef char* raw = announced
        with nogil:
            pyhvd_agreement_read(table, <uint32_t>set_id, <uint64_t*>raw)
        found = {}
        for host, ranks in enumerate(self.hosts):
            bits = int.from_bytes(announced[host * step : (host + 1) * step], "little")
            if bits and host != <int>self.c.tree.host:
                found.update(dict.fromkeys(ranks, bits))
        return found

    cdef tuple lost(self):
        """Return (host, the host that found it so, errno or 0, note) of a lost or failed host; or None."""
        cdef pyhvd_shared_agreement* shared = self.c.shared
        cdef uint32_t found = shared.lost
        if not found:
            return None
        error = 0 if shared.error == PYHVD_CLOSED_BY_PEER else shared.error
        return int(found) - 1, int(shared.finder), error, (<const char*>shared.note)[:shared.note_bytes]
