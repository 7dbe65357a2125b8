/* The ready table without a progress engine. Every rank marks slots, carries out the log's entries
 * with drawn delays, and sometimes lets the log fill up. Ranks read in plain words what the others
 * wrote before their marks. Cursors of ranks that a set does not include are moved by others. Rank
 * 0 recalls slots, delegates them again, and appends lists. */
#include "races.h"

#include <stdlib.h>
#include <string.h>

#include "agreement/ready_table.h"

#define SLOTS 128
#define WORDS (SLOTS / 64)
#define SETS 3
#define POSITIONS (1 << 20) /* of the log */

typedef struct {
    const terms *t;
    void *base;
    _Atomic uint32_t closed;
    uint32_t ranks[SETS][MOST_RANKS], count[SETS];
    /* the turn that a rank has marked; odd and even turns apart */
    uint64_t values[SETS][MOST_RANKS][SLOTS][2];
    _Atomic uint64_t again[SETS][MOST_RANKS][WORDS]; /* recalled, to be marked again */
    /* a hash of each entry, by the first rank that saw it */
    _Atomic uint64_t seen[POSITIONS];
    pthread_barrier_t meet;
} stage;

typedef struct {
    stage *s;
    int rank;
    pyhvd_ready_table b;
    dice draw;
    uint64_t turns[SETS][SLOTS], flying[SETS][WORDS], left, told, listed;
} player;

static int is_member(const stage *s, uint32_t set, int rank) {
    for (uint32_t k = 0; k < s->count[set]; k++)
        if (s->ranks[set][k] == (uint32_t)rank) return 1;
    return 0;
}

static void mark(player *p, uint32_t set, uint32_t *slots, uint32_t n) {
    uint64_t versions[SLOTS];
    pyhvd_slot_list posting = {.n = n, .ids = slots, .versions = versions};
    pyhvd_ranks audience = {{0}};
    for (uint32_t k = 0; k < n; k++) versions[k] = 1;
    if (!pyhvd_ready_table_lock(&p->b, -1)) fail("rank %d: no lock", p->rank);
    int taken = pyhvd_ready_table_mark_ready(&p->b, set, &posting, pyhvd_now());
    uint32_t first = slots[0] / 64, last = slots[n - 1] / 64 + 1;
    if (taken) pyhvd_ready_table_match(&p->b, set, first, last, pyhvd_now(), &audience);
    pyhvd_ready_table_unlock(&p->b, &audience);
    for (uint32_t k = 0; k < n && !taken; k++) /* recalled meanwhile */
        atomic_fetch_or(&p->s->again[set][p->rank][slots[k] / 64], (uint64_t)1 << slots[k] % 64);
}

/* Mark slots that are not in flight, in lists of a drawn length. */
static void mark_some(player *p, uint32_t set) {
    uint32_t slots[SLOTS], n = 0, most = 1 + (uint32_t)roll(&p->draw, roll(&p->draw, 4) ? 2 : 16);
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        uint64_t bit = (uint64_t)1 << slot % 64, turn = p->turns[set][slot] + 1;
        if (p->flying[set][slot / 64] & bit || turn > (uint64_t)p->s->t->rounds ||
            !roll(&p->draw, 8))
            continue;
        p->flying[set][slot / 64] |= bit;
        p->turns[set][slot] = turn;
        p->s->values[set][p->rank][slot][turn % 2] = turn;
        slots[n++] = slot;
        if (n < most) continue;
        mark(p, set, slots, n);
        n = 0;
        linger(&p->draw);
    }
    if (n) mark(p, set, slots, n);
    for (uint32_t w = 0; w < WORDS; w++)
        for (uint64_t bits = atomic_exchange(&p->s->again[set][p->rank][w], 0); bits;
             bits &= bits - 1) {
            slots[0] = w * 64 + (uint32_t)__builtin_ctzll(bits);
            mark(p, set, slots, 1);
        }
}

static void carry_out(player *p, const pyhvd_log_entry *entry) {
    for (uint32_t w = entry->first; w < entry->end; w++)
        for (uint64_t bits = entry->words[w - entry->first]; bits; bits &= bits - 1) {
            uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(bits), set = entry->set;
            uint64_t bit = (uint64_t)1 << slot % 64, turn = p->turns[set][slot];
            if (!(p->flying[set][w] & bit))
                fail("rank %d: slot %d of set %d was not marked", p->rank, slot, set);
            for (uint32_t k = 0; k < p->s->count[set]; k++)
                if (p->s->values[set][p->s->ranks[set][k]][slot][turn % 2] != turn)
                    fail("rank %d: rank %d is not at turn %d", p->rank, p->s->ranks[set][k],
                         (int)turn);
            p->flying[set][w] &= ~bit;
            p->left--;
        }
}

/* Check that all ranks see the same entry. */
static void compare(player *p, const pyhvd_log_entry *entry) {
    uint64_t position = pyhvd_ready_table_position(&p->b), what = mixed(entry->kind), first = 0;
    if (position >= POSITIONS) fail("the log is longer than %d", POSITIONS);
    if (entry->kind == PYHVD_LIST)
        what += mixed(entry->number + 7);
    else
        for (uint32_t w = entry->first; w < entry->end; w++)
            what += mixed(entry->words[w - entry->first] + w + entry->set + entry->last_rank);
    if (!atomic_compare_exchange_strong(&p->s->seen[position], &first, what) && first != what)
        fail("rank %d: the entry at %d is another one", p->rank, (int)position);
}

static void follow(player *p) {
    const pyhvd_log_entry *entry;
    while ((entry = pyhvd_ready_table_next(&p->b))) {
        compare(p, entry);
        if (entry->kind == PYHVD_BATCH)
            carry_out(p, entry);
        else if (entry->number <= p->listed)
            fail("rank %d: list %d again", p->rank, (int)entry->number);
        else
            p->listed = entry->number;
        pyhvd_ready_table_advance(&p->b);
        linger(&p->draw);
    }
}

/* Act as the coordinator. */
static void coordinate(player *p) {
    uint64_t bits[WORDS], marked[MOST_RANKS * WORDS], used[WORDS];
    uint32_t set = (uint32_t)roll(&p->draw, SETS);
    stage *s = p->s;
    for (uint32_t w = 0; w < WORDS; w++)
        bits[w] = mixed(roll(&p->draw, 1000)) & mixed(roll(&p->draw, 1000));
    pyhvd_ready_table_read(&p->b, set, marked, used);
    if (roll(&p->draw, 2))
        pyhvd_ready_table_freeze(&p->b, set, (uint32_t)__builtin_ctzll(bits[0] | 1));
    bits[0] |= bits[0] ? 0 : 1;
    pyhvd_ready_table_recall(&p->b, set, bits, marked);
    for (int q = 0; q < s->t->size; q++)
        for (uint32_t w = 0; w < WORDS; w++)
            atomic_fetch_or(&s->again[set][q][w], marked[(uint32_t)q * WORDS + w]);
    linger(&p->draw);
    for (uint32_t slot = 0; slot < SLOTS; slot++) pyhvd_ready_table_delegate(&p->b, set, slot, 1);
    pyhvd_ranks audience = {{1 + roll(&p->draw, ((uint64_t)1 << s->t->size) - 1)}};
    if (pyhvd_ready_table_append_list(&p->b, p->told + 1, &audience)) p->told++;
}

static void use(int rank, void *what) {
    stage *s = what;
    player *p = make(sizeof *p);
    p->s = s;
    p->rank = rank;
    p->draw = dice_of(s->t->seed, (uint64_t)rank);
    p->b.closed = &s->closed;
    pyhvd_ready_table_attach(&p->b, s->base, rank, s->t->size, SLOTS);
    if (!rank) {
        pyhvd_ready_table_clear(&p->b);
        for (uint32_t set = 0; set < SETS; set++) {
            pyhvd_ready_table_open_set(&p->b, set, s->ranks[set], s->count[set], 0);
            for (uint32_t slot = 0; slot < SLOTS; slot++)
                pyhvd_ready_table_delegate(&p->b, set, slot, 1);
        }
    }
    for (uint32_t set = 0; set < SETS; set++)
        if (is_member(s, set, rank)) p->left += SLOTS * (uint64_t)s->t->rounds;
    pthread_barrier_wait(&s->meet);
    while (p->left) {
        for (uint32_t set = 0; set < SETS; set++)
            if (is_member(s, set, rank)) mark_some(p, set);
        if (!rank && !roll(&p->draw, 4)) coordinate(p);
        if (!roll(&p->draw, 16)) pyhvd_nap(2000000); /* the log fills up */
        follow(p);
    }
    free(p);
}

void play_table(const terms *t) {
    stage *s = make(sizeof *s);
    s->t = t;
    s->base = make(pyhvd_ready_table_bytes(t->size, SLOTS));
    pthread_barrier_init(&s->meet, NULL, (unsigned)t->size);
    for (uint32_t q = 0; q < (uint32_t)t->size; q++) {
        s->ranks[0][s->count[0]++] = q;
        if (q + 1 < (uint32_t)t->size || t->size == 2) s->ranks[1][s->count[1]++] = q;
        if (!q || q + 1 == (uint32_t)t->size) s->ranks[2][s->count[2]++] = q;
    }
    play(t->size, use, s);
    pthread_barrier_destroy(&s->meet);
    free(s->base);
    free(s);
}
