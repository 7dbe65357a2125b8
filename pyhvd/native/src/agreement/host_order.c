/* The order across hosts; host_order.h states the invariants and the format of messages. */
#include "agreement/host_order.h"

#include <string.h>

#define HEADER_WORDS (sizeof(pyhvd_order_header) / 8)
#define LIST_HEAD_WORDS (sizeof(pyhvd_order_list_head) / 8)
#define SECTION_WORDS (sizeof(pyhvd_order_section) / 8)

/* ---- layout ---- */

size_t pyhvd_host_order_bytes(uint32_t sets, uint32_t slots) {
    return sizeof(pyhvd_host_order) + (size_t)sets * (slots / 64) * sizeof(pyhvd_order_group);
}

void pyhvd_host_order_init(pyhvd_host_order *o, uint32_t host, uint32_t hosts, uint32_t sets,
                           uint32_t slots) {
    memset(o, 0, pyhvd_host_order_bytes(sets, slots));
    o->host = host;
    o->hosts = hosts;
    o->sets = sets;
    o->words = slots / 64;
}

static uint64_t bit(uint32_t k) { return (uint64_t)1 << k; }
static uint64_t words_of(uint64_t bytes) { return (bytes + 7) / 8; }
static uint64_t recalls(uint64_t round) { return round >> 1; }

/* ---- rounds ---- */

/* Note if all hosts have announced a slot in its current round. */
static void note_complete(pyhvd_host_order *o, pyhvd_order_group *g, uint32_t set, uint32_t k) {
    if (g->current[k].hosts != UINT64_MAX >> (PYHVD_MAX_HOSTS - o->hosts)) return;
    g->complete |= bit(k);
    if (g->current[k].digest == PYHVD_ORDER_UNLIKE) g->unlike |= bit(k);
    o->complete[set]++;
    o->latest = MAX(o->latest, g->current[k].time);
}

/* Begin the next round of slots that are decided, or recalled. */
static void begin_rounds(pyhvd_host_order *o, uint32_t set, uint32_t word, uint64_t slots,
                         int recalled) {
    pyhvd_order_group *g = pyhvd_order_group_at(o, set, word);
    o->complete[set] -= (uint32_t)__builtin_popcountll(g->complete & slots);
    g->complete &= ~slots;
    g->unlike &= ~slots;
    g->announced &= ~slots;
    for (; slots; slots &= slots - 1) {
        uint32_t k = (uint32_t)__builtin_ctzll(slots);
        pyhvd_order_cell *current = &g->current[k], *next = &g->next[k];
        uint64_t round = recalled ? current->round + 2 : current->round ^ 1;
        *current = next->round == round ? *next : (pyhvd_order_cell){.round = round};
        if (next->round == round) *next = (pyhvd_order_cell){0};
        note_complete(o, g, set, k);
    }
}

/* What an announcement says of a slot. */
typedef struct {
    uint64_t round, stamp, digest;
} news;

/* Record a host's announcement of a slot; return 0 if it cannot be right. */
static int record(pyhvd_host_order *o, uint32_t source, uint32_t set, uint32_t word, uint32_t k,
                  news told) {
    pyhvd_order_group *g = pyhvd_order_group_at(o, set, word);
    pyhvd_order_cell *cell = &g->current[k], *next = &g->next[k];
    if (told.round != cell->round) {
        if (recalls(told.round) < recalls(cell->round)) return 1;
        if (next->hosts && recalls(told.round) < recalls(next->round)) return 1;
        if (!next->hosts || recalls(told.round) > recalls(next->round))
            *next = (pyhvd_order_cell){.round = told.round};
        cell = next;
    }
    if (told.round != cell->round || cell->hosts & bit(source)) return 0;
    cell->digest = cell->hosts ? pyhvd_order_compare(cell->digest, told.digest) : told.digest;
    cell->hosts |= bit(source);
    cell->time = MAX(cell->time, told.stamp);
    if (source == o->host) g->announced |= bit(k);
    if (cell != next) note_complete(o, g, set, k);
    return 1;
}

/* ---- reading messages ---- */

/* Read the section between `at` and `end`; return where it ends, NULL if it is malformed. */
static const uint64_t *read_section(const pyhvd_host_order *o, const uint64_t *at,
                                    const uint64_t *end, pyhvd_slot_range *range) {
    pyhvd_order_section head;
    size_t left = (size_t)(end - at), words, slots = 0, digests = 0;
    if (left < SECTION_WORDS) return NULL;
    memcpy(&head, at, sizeof head);
    if (head.set >= o->sets || head.first >= head.end || head.end > o->words ||
        head.end - head.first > PYHVD_RANGE_WORDS)
        return NULL;
    at += SECTION_WORDS;
    left -= SECTION_WORDS;
    words = (size_t)(head.end - head.first);
    if (words > left || head.n > left - words) return NULL;
    for (size_t w = 0; w < words; w++) slots += (size_t)__builtin_popcountll(at[w]);
    if (head.kind == PYHVD_COMPARED) digests = (size_t)__builtin_popcountll(at[words - 1]);
    if (head.n < digests) return NULL;
    size_t n = head.n - digests;
    if (head.kind == PYHVD_RECALLED ? n != 0 : n != 1 && n != slots) return NULL;
    *range = (pyhvd_slot_range){head.kind, head.set,   head.first, head.end,
                                at,        at + words, n,          digests ? at + words + n : NULL};
    return at + words + head.n;
}

/* Return where the list behind this position begins: no list is cut at the ring's end. */
static uint64_t place(uint64_t position) {
    uint64_t left = PYHVD_ORDER_RING - position % PYHVD_ORDER_RING;
    return position + (left < PYHVD_ORDER_LIST_MAX ? left : 0);
}

/* Return whether there is a list between `at` and `end`, with that time. */
static int is_list(const pyhvd_host_order *o, uint64_t time, const uint64_t *at,
                   const uint64_t *end) {
    pyhvd_order_list_head head;
    size_t bytes = (size_t)(end - at) * 8;
    if (bytes < sizeof head || bytes > PYHVD_ORDER_LIST_MAX) return 0;
    memcpy(&head, at, sizeof head);
    if (head.time != time || head.bytes != bytes || head.audience_bytes > bytes - sizeof head)
        return 0;
    at += LIST_HEAD_WORDS + words_of(head.audience_bytes);
    uint32_t n = 0;
    for (pyhvd_slot_range range; at && at < end; n++) {
        at = read_section(o, at, end, &range);
        if (at && range.kind != PYHVD_RECALLED && range.kind != PYHVD_DELEGATED) return 0;
    }
    return at != NULL && n <= PYHVD_ORDER_RANGES;
}

/* Whether the ring has room for a list of that many bytes on all hosts, as far as this one knows. */
static int ring_has_room(const pyhvd_host_order *o, uint64_t bytes) {
    uint64_t lowest = UINT64_MAX;
    for (uint32_t host = 0; host < o->hosts; host++) lowest = MIN(lowest, o->taken[host]);
    return place(o->tail) + bytes - lowest <= PYHVD_ORDER_RING;
}

int pyhvd_host_order_has_room(const pyhvd_host_order *o) {
    return ring_has_room(o, PYHVD_ORDER_LIST_MAX);
}

/* Read a header; return whether it may be that of the next message of a host. */
static int read_header(const pyhvd_host_order *o, uint32_t source, const uint64_t *message,
                       size_t bytes, pyhvd_order_header *head) {
    if (bytes < sizeof *head || bytes % 8) return 0;
    memcpy(head, message, sizeof *head);
    if (head->list && (source != 0 || head->list % 8 || head->list < sizeof *head)) return 0;
    return head->bytes == bytes && head->list < bytes && head->before == o->counts[source] &&
           head->stamp > head->before && head->upto >= head->stamp &&
           head->upto <= PYHVD_ORDER_COUNT_MAX && head->taken >= o->taken[source] &&
           head->entries >= o->entries[source] && (o->host != 0 || head->taken <= o->tail);
}

/* Carry out a message, which may be this host's own. */
static int carry_out(pyhvd_host_order *o, uint32_t source, const uint64_t *message, size_t bytes) {
    pyhvd_order_header head;
    if (!read_header(o, source, message, bytes, &head)) return PYHVD_ORDER_INVALID;
    const uint64_t *at = message + HEADER_WORDS;
    const uint64_t *list = message + (head.list ? head.list : bytes) / 8;
    uint64_t size = head.list ? bytes - head.list : 0, begin = place(o->tail);
    if (size && (!is_list(o, head.stamp, list, message + bytes / 8) ||
                 begin + size - o->taken[o->host] > PYHVD_ORDER_RING))
        return PYHVD_ORDER_INVALID;
    for (pyhvd_slot_range r; at < list;) {
        at = read_section(o, at, list, &r);
        if (!at || (r.kind != PYHVD_ANNOUNCED && r.kind != PYHVD_COMPARED))
            return PYHVD_ORDER_INVALID;
        for (uint32_t w = r.first; w < r.end; w++) {
            for (uint64_t rest = r.words[w - r.first]; rest; rest &= rest - 1) {
                uint32_t k = (uint32_t)__builtin_ctzll(rest);
                uint64_t digest = r.digests && w + 1 == r.end ? *r.digests++ : 0;
                if (!record(o, source, r.set, w, k, (news){*r.values, head.stamp, digest}))
                    return PYHVD_ORDER_INVALID;
                r.values += r.n > 1;
            }
        }
    }
    if (size) {
        memcpy(&o->ring[begin % PYHVD_ORDER_RING / 8], list, size);
        o->tail = begin + size;
        o->latest = MAX(o->latest, head.stamp);
    }
    o->counts[source] = head.upto;
    o->taken[source] = head.taken;
    o->entries[source] = head.entries;
    return 0;
}

int pyhvd_host_order_receive(pyhvd_host_order *o, uint32_t source, const uint64_t *message,
                             size_t bytes) {
    int known = source < o->hosts && source != o->host;
    return known ? carry_out(o, source, message, bytes) : PYHVD_ORDER_INVALID;
}

/* ---- writing messages ---- */

typedef struct {
    uint64_t *at, *end;
} writer;

/* Write bytes, padded to words; return 0 if there is no room. */
static int put(writer *w, const void *bytes, size_t n) {
    if ((size_t)(w->end - w->at) < words_of(n)) return 0;
    if (n % 8) w->at[n / 8] = 0;
    if (n) memcpy(w->at, bytes, n);
    w->at += words_of(n);
    return 1;
}

static int is_range(const pyhvd_host_order *o, const pyhvd_slot_range *range) {
    return range->set < o->sets && range->first < range->end && range->end <= o->words &&
           range->end - range->first <= PYHVD_RANGE_WORDS && range->n <= 64 * PYHVD_RANGE_WORDS;
}

static int put_section(writer *w, const pyhvd_slot_range *range) {
    pyhvd_order_section head = {(uint16_t)range->kind, (uint16_t)range->set, (uint16_t)range->first,
                                (uint16_t)range->end, range->n};
    return put(w, &head, sizeof head) &&
           put(w, range->words, (range->end - range->first) * sizeof(uint64_t)) &&
           put(w, range->values, range->n * sizeof(uint64_t));
}

/* Add digests of the slots of a section's last word behind its rounds, at `out`, unless all are 0. */
static void add_digests(pyhvd_slot_range *section, const uint64_t *digests, uint64_t *out) {
    uint64_t n = 0, any = 0;
    for (uint64_t left = section->words[section->end - 1 - section->first]; left; left &= left - 1)
        any |= out[n++] = digests[__builtin_ctzll(left)];
    if (!any) return;
    section->kind = PYHVD_COMPARED;
    section->n += n;
}

/* Write a section of the slots that are not announced yet, and raise the stamp to the known stamps
 * of these slots. */
static int put_announced(writer *w, const pyhvd_host_order *o, const pyhvd_slot_range *range,
                         uint64_t *stamp) {
    uint64_t bits[PYHVD_RANGE_WORDS], values[64 * PYHVD_RANGE_WORDS + 64], n = 0, differ = 0;
    for (uint32_t k = range->first; k < range->end; k++) {
        const pyhvd_order_group *g = pyhvd_order_group_at(o, range->set, k);
        uint64_t left = range->words[k - range->first] & ~g->announced;
        bits[k - range->first] = left;
        for (; left; left &= left - 1) {
            const pyhvd_order_cell *cell = &g->current[__builtin_ctzll(left)];
            *stamp = MAX(*stamp, cell->time);
            values[n++] = cell->round;
            differ |= cell->round ^ values[0];
        }
    }
    if (!n) return 1;
    pyhvd_slot_range new = {PYHVD_ANNOUNCED, range->set,     range->first, range->end, bits,
                            values,          differ ? n : 1, NULL};
    if (range->digests && range->end == o->words) add_digests(&new, range->digests, values + new.n);
    return put_section(w, &new);
}

/* Write a list; return 0, PYHVD_LATER or PYHVD_ORDER_INVALID. */
static int put_list(writer *w, const pyhvd_host_order *o, const pyhvd_order_list *list,
                    uint64_t time) {
    pyhvd_order_list_head head = {time, list->number, 0, list->audience_bytes};
    uint64_t *begin = w->at;
    int room = put(w, &head, sizeof head) && put(w, list->audience, list->audience_bytes);
    for (uint32_t k = 0; k < list->n && room; k++) {
        if (!is_range(o, &list->ranges[k])) return PYHVD_ORDER_INVALID;
        room = put_section(w, &list->ranges[k]);
    }
    if (!room) return PYHVD_LATER;
    head.bytes = (uint32_t)((w->at - begin) * 8);
    memcpy(begin, &head, sizeof head);
    if (o->host != 0 || !is_list(o, time, begin, w->at)) return PYHVD_ORDER_INVALID;
    return ring_has_room(o, head.bytes) ? 0 : PYHVD_LATER;
}

/* Write a message, and carry it out here. Then raise the count: an empty message raises it to the
 * times that are known, another one also above all counts that are known. */
static int64_t compose(pyhvd_host_order *o, const pyhvd_slot_range *ranges, uint32_t n,
                       const pyhvd_order_list *list, int empty, uint64_t *out, size_t room) {
    pyhvd_order_header head = {
        .before = o->counts[o->host], .taken = o->taken[o->host], .entries = o->entries[o->host]};
    writer w = {out + HEADER_WORDS, out + MIN(room, UINT32_MAX) / 8};
    head.stamp = head.before + 1;
    if (room < sizeof head) return PYHVD_LATER;
    for (uint32_t k = 0; k < n; k++) {
        if (!is_range(o, &ranges[k])) return PYHVD_ORDER_INVALID;
        if (!put_announced(&w, o, &ranges[k], &head.stamp)) return PYHVD_LATER;
    }
    head.list = list ? (uint32_t)((w.at - out) * 8) : 0;
    int refused = list ? put_list(&w, o, list, head.stamp) : 0;
    if (refused) return refused;
    head.bytes = (uint32_t)((w.at - out) * 8);
    if (head.bytes == sizeof head && !empty) return 0;
    head.upto = head.stamp;
    memcpy(out, &head, sizeof head);
    if (carry_out(o, o->host, out, head.bytes)) return PYHVD_ORDER_INVALID;
    head.upto = MAX(head.upto, o->latest);
    for (uint32_t host = 0; host < o->hosts && !empty; host++)
        if (host != o->host) head.upto = MAX(head.upto, o->counts[host] + 1);
    memcpy(out, &head, sizeof head);
    o->counts[o->host] = head.upto;
    o->told = head.taken;
    return head.bytes;
}

int64_t pyhvd_host_order_announce(pyhvd_host_order *o, const pyhvd_slot_range *ranges, uint32_t n,
                                  const pyhvd_order_list *list, uint64_t *out, size_t room) {
    return compose(o, ranges, n, list, 0, out, room);
}

int64_t pyhvd_host_order_owed(pyhvd_host_order *o, uint64_t *out, size_t room) {
    uint64_t untold = o->host == 0 ? 0 : o->taken[o->host] - o->told;
    int owes = o->latest > o->counts[o->host] || untold > PYHVD_ORDER_RING / 2;
    return owes ? compose(o, NULL, 0, NULL, 1, out, room) : 0;
}

/* ---- the log ---- */

/* Find the complete slots that come first, and return their time; UINT64_MAX: there are none. */
static uint64_t find_batch(pyhvd_host_order *o, pyhvd_order_entry *entry) {
    entry->kind = PYHVD_BATCH;
    entry->time = UINT64_MAX;
    entry->unlike = 0;
    for (uint32_t set = 0; set < o->sets; set++) {
        uint32_t left = o->complete[set];
        for (uint32_t w = 0; left; w++) {
            const pyhvd_order_group *g = pyhvd_order_group_at(o, set, w);
            left -= (uint32_t)__builtin_popcountll(g->complete);
            for (uint64_t rest = g->complete; rest; rest &= rest - 1) {
                uint64_t time = g->current[__builtin_ctzll(rest)].time;
                if (time < entry->time) {
                    entry->time = time;
                    entry->set = set;
                    entry->first = entry->end = w;
                }
                if (time != entry->time || set != entry->set) continue;
                if (w - entry->first >= PYHVD_RANGE_WORDS) continue;
                while (entry->end <= w) entry->words[entry->end++ - entry->first] = 0;
                entry->words[w - entry->first] |= rest & -rest;
            }
        }
    }
    return entry->time;
}

static void take_list(pyhvd_host_order *o, const uint64_t *list, pyhvd_order_entry *entry) {
    pyhvd_order_list_head head;
    memcpy(&head, list, sizeof head);
    entry->kind = PYHVD_LIST;
    entry->time = head.time;
    entry->number = head.number;
    entry->audience = (const uint8_t *)(list + LIST_HEAD_WORDS);
    entry->audience_bytes = head.audience_bytes;
    entry->sections = list + LIST_HEAD_WORDS + words_of(head.audience_bytes);
    entry->sections_end = list + head.bytes / 8;
    o->taken[o->host] = place(o->taken[o->host]) + head.bytes;
    pyhvd_slot_range range;
    for (pyhvd_order_entry rest = *entry; pyhvd_host_order_next_range(o, &rest, &range);)
        for (uint32_t w = range.first; w < range.end && range.kind == PYHVD_RECALLED; w++)
            begin_rounds(o, range.set, w, range.words[w - range.first], 1);
}

int pyhvd_host_order_take(pyhvd_host_order *o, pyhvd_order_entry *entry) {
    const uint64_t *list = &o->ring[place(o->taken[o->host]) % PYHVD_ORDER_RING / 8];
    uint64_t reached = UINT64_MAX, list_time = o->taken[o->host] == o->tail ? UINT64_MAX : *list;
    for (uint32_t host = 0; host < o->hosts; host++) reached = MIN(reached, o->counts[host]);
    uint64_t time = find_batch(o, entry);
    if (MIN(list_time, time) > reached) return 0;
    o->entries[o->host]++;
    if (list_time <= time)
        take_list(o, list, entry);
    else
        for (uint32_t w = entry->first; w < entry->end; w++) {
            if (w + 1 == o->words)
                entry->unlike = pyhvd_order_group_at(o, entry->set, w)->unlike &
                                entry->words[w - entry->first];
            begin_rounds(o, entry->set, w, entry->words[w - entry->first], 0);
        }
    return 1;
}

int pyhvd_host_order_next_range(const pyhvd_host_order *o, pyhvd_order_entry *entry,
                                pyhvd_slot_range *range) {
    if (entry->sections == entry->sections_end) return 0;
    entry->sections = read_section(o, entry->sections, entry->sections_end, range);
    return 1;
}
