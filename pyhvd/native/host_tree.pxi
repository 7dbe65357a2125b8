# The order across hosts: response lists in its form, and a host's place in the tree of hosts without a ready
# table; a part of shared_memory.pyx.

cdef class OrderList:
    """A response list in the form of host_order.h, with what it points to.

    Parameters
    ----------
    number : int
        The list's number; 0: recalls and delegations only.
    audience : int
        The ranks that it concerns, as a bit vector.
    recalled : dict of int to int
        Slots that it recalls, as bit vectors, by process set.
    delegated : dict of int to (dict of int to int)
        Slots that it delegates, with their versions, by process set.

    Raises
    ------
    ValueError
        The slots make up more ranges than a list can have.
    """

    cdef pyhvd_order_list c
    cdef pyhvd_slot_range[ORDER_RANGES] ranges
    cdef list kept  # what the ranges point to

    def __cinit__(self, uint64_t number, audience, dict recalled, dict delegated):
        cdef bytes ranks = audience.to_bytes((audience.bit_length() + 7) // 8, "little")
        self.kept = [ranks]
        self.c.number = number
        self.c.audience = <const uint8_t*><const char*>ranks
        self.c.audience_bytes = <uint32_t>len(ranks)
        self.c.ranges = self.ranges
        for set_id, bits in recalled.items():
            for part in in_ranges(bits):
                self.add(PYHVD_RECALLED, set_id, part, b"")
        for set_id, slots in delegated.items():
            for part in in_ranges(sum(1 << slot for slot in slots)):
                versions = [slots[slot] for slot in sorted(slots) if part >> slot & 1]
                if len(set(versions)) == 1:
                    versions = versions[:1]
                packed = b"".join(int(version).to_bytes(8, "little") for version in versions)
                self.add(PYHVD_DELEGATED, set_id, part, packed)

    cdef int add(self, uint32_t kind, uint32_t set_id, bits, bytes values) except -1:
        if self.c.n == ORDER_RANGES:
            raise ValueError(f"a list recalls and delegates at most {ORDER_RANGES} ranges of slots")
        fill_range(&self.ranges[self.c.n], kind, set_id, bits, values, self.kept)
        self.c.n += 1
        return 0


cdef list in_ranges(bits):
    """Cut a bit vector of slots into vectors of which each is one range; see host_order.h, invariant 12."""
    cdef object most = 64 * RANGE_WORDS
    return [
        part << at for at in range(0, bits.bit_length(), most) if (part := bits >> at & (1 << most) - 1)
    ]


cdef int fill_range(
    pyhvd_slot_range* slots, uint32_t kind, uint32_t set_id, bits, bytes values, list kept
) except -1:
    """Fill a range from its slots, which are not empty, as a bit vector; `kept` keeps what it points to."""
    cdef uint32_t first = ((bits & -bits).bit_length() - 1) // 64
    cdef uint32_t end = (bits.bit_length() + 63) // 64
    cdef bytes words = (bits >> 64 * first).to_bytes((end - first) * 8, "little")
    kept += [words, values]
    slots.kind, slots.set, slots.first, slots.end = kind, set_id, first, end
    slots.words = <const uint64_t*><const char*>words
    slots.values = <const uint64_t*><const char*>values
    slots.n = <uint64_t>(len(values) // 8)
    slots.digests = NULL
    return 0


cdef int init_tree(pyhvd_host_tree* tree, uint32_t host, parents) except -1:
    """Find a host's place in the tree with these parents; raise ValueError if there is no such tree."""
    cdef int32_t[MAX_HOSTS] above
    if not 2 <= len(parents) <= MAX_HOSTS:
        raise ValueError(f"{len(parents)} hosts cannot agree: 2 to {MAX_HOSTS} can")
    for k, parent in enumerate(parents):
        above[<int>k] = parent
    if pyhvd_host_tree_init(tree, host, <uint32_t>len(parents), above):
        raise ValueError(f"{list(parents)} are not the parents of hosts in a tree")
    return 0


cdef class HostTree:
    """One host's place in the tree of hosts, as a machine alone, for simulations; see host_tree.h.

    Messages are bytes. Those to send come as pairs: the neighbour, and the message. Slots are bit vectors.

    Parameters
    ----------
    host : int
        This host.
    parents : sequence of int
        The parent of each host, which has a lower number; -1 for the tops, which are the first hosts.
    sets : int
        Number of process sets, at most :data:`SETS`.
    slots : int
        Number of slots of each set: a multiple of 64, at most :data:`MAX_SLOTS`.

    Raises
    ------
    ValueError
        There is no such tree, or it has too many hosts, sets or slots.
    """

    cdef pyhvd_host_tree c
    cdef void* memory
    cdef uint64_t[6144] out
    cdef readonly list above
    cdef readonly list below

    def __cinit__(self, uint32_t host, parents, uint32_t sets, uint32_t slots):
        init_tree(&self.c, host, parents)
        if not (0 < sets <= SETS and 0 < slots <= MAX_SLOTS) or slots % 64:
            raise ValueError(f"{sets} sets of {slots} slots: at most {SETS} of {MAX_SLOTS}, a multiple of 64")
        self.memory = calloc(1, pyhvd_host_tree_bytes(&self.c, sets, slots))
        if self.memory is NULL:
            raise MemoryError
        pyhvd_host_tree_attach(&self.c, self.memory, sets, slots)
        pyhvd_host_tree_clear(&self.c, sets, slots)
        neighbours = [self.c.neighbours[k] for k in range(self.c.n)]
        self.above, self.below = neighbours[: self.c.above], neighbours[self.c.above :]

    def __dealloc__(self):
        free(self.memory)

    def announce(self, int set_id, bits):
        """Announce slots that all ranks of this host have marked; return the messages."""
        cdef pyhvd_slot_range slots
        cdef list kept = []
        messages = []
        for part in in_ranges(bits):
            fill_range(&slots, PYHVD_ANNOUNCED, set_id, part, b"", kept)
            messages += self.to_above(
                pyhvd_host_tree_announce(&self.c, &slots, NULL, self.out, sizeof(self.out))
            )
        return messages

    def announce_list(self, int number, audience, dict recalled, dict delegated):
        """Announce a response list, on host 0; see :class:`OrderList`. Return the messages.

        Returns None if there is no room for lists that others have not taken.
        """
        cdef OrderList announced = OrderList(number, audience, recalled, delegated)
        return self.to_above(
            pyhvd_host_tree_announce(&self.c, NULL, &announced.c, self.out, sizeof(self.out))
        )

    def owed(self):
        """Return the messages that this host owes."""
        return self.to_above(pyhvd_host_order_owed(self.c.order, self.out, sizeof(self.out)))

    cdef list to_above(self, int64_t written):
        if written == PYHVD_LATER:
            return None
        if written < 0:
            raise ValueError("a list that cannot be encoded")
        cdef bytes message = (<const char*>self.out)[:written]
        return [(host, message) for host in self.above] if written else []

    def receive(self, uint32_t source, bytes message):
        """Take the next message of a neighbour; call :meth:`announce` again, if it is a host below.

        Raises
        ------
        ValueError
            The message is malformed, or not the next one.
        """
        memcpy(self.out, <const char*>message, min(<size_t>len(message), sizeof(self.out)))
        if pyhvd_host_tree_receive(&self.c, source, self.out, <size_t>len(message)):
            raise ValueError(f"a malformed message of host {source}")

    def take(self):
        """Return the next entry of the log, or None.

        Returns
        -------
        is_list : bool
            Whether it is a response list, not a batch.
        number : int
            The list's; the process set of a batch.
        slots : dict of int to int
            The batch's slots, or those that the list recalls, by process set.
        delegated : dict of int to (dict of int to int)
            The slots that the list delegates, with their versions, by process set.
        messages : list of (int, bytes)
            What passes the entry on to the hosts below.
        """
        cdef pyhvd_order_entry entry
        cdef pyhvd_slot_range found
        cdef int64_t written
        if not pyhvd_host_tree_take(&self.c, &entry):
            return None
        messages = []
        for child in self.below:
            written = pyhvd_host_tree_pass(&self.c, child, &entry, self.out, sizeof(self.out))
            if written > 0:
                messages.append((child, (<const char*>self.out)[:written]))
        if entry.kind == PYHVD_BATCH:
            bits = bits_in(entry.words, entry.first, entry.end)
            return False, entry.set, {entry.set: bits}, {}, messages
        recalled, delegated = {}, {}
        while pyhvd_host_order_next_range(self.c.order, &entry, &found):
            bits = bits_in(found.words, found.first, found.end)
            if found.kind == PYHVD_RECALLED:
                recalled[found.set] = bits
            else:
                slots = [slot for slot in range(64 * found.first, 64 * found.end) if bits >> slot & 1]
                delegated[found.set] = {
                    slot: found.values[k if found.n > 1 else 0] for k, slot in enumerate(slots)
                }
        return True, entry.number, recalled, delegated, messages


cdef object bits_in(const uint64_t* words, uint32_t first, uint32_t end):
    """Return the words [first, end) as a bit vector; `words` has the first one first."""
    return int.from_bytes((<const char*>words)[: (end - first) * 8], "little") << 64 * first
