/* Several hosts in one process: ranks on different hosts share no memory, but connections. */
#include "races.h"

#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

static void connect_pair(int *a, int *b) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair)) fail("no connection");
    *a = pair[0], *b = pair[1];
}

static int new_bell(void) {
    int bell = eventfd(0, EFD_NONBLOCK);
    if (bell < 0) fail("no bell");
    return bell;
}

void draw_layout(layout *l, int size, dice *plan) {
    memset(l, 0, sizeof *l);
    if (size < 2) fail("several hosts have 2 ranks at least");
    l->hosts = 2 + (int)roll(plan, (uint64_t)(size < MOST_HOSTS ? size : MOST_HOSTS) - 1);
    for (int h = 0; h < l->hosts; h++) l->ranks[h] = 1;
    for (int left = size - l->hosts; left; left--) l->ranks[roll(plan, (uint64_t)l->hosts)]++;
    int tops = 1 + (int)roll(plan, (uint64_t)l->hosts);
    for (int h = 0; h < l->hosts; h++) {
        l->parents[h] = h < tops ? -1 : (int32_t)roll(plan, (uint64_t)h);
        l->first[h + 1] = l->first[h] + l->ranks[h];
        if (l->ranks[h] > l->slices) l->slices = l->ranks[h];
        for (int q = l->first[h]; q < l->first[h + 1]; q++) l->host_of[q] = h;
    }
}

void connect_hosts(layout *l) {
    for (int q = 0; q < l->first[l->hosts]; q++)
        for (int k = 0; k < BELLS; k++) l->bells[k][q] = new_bell();
    for (int k = 0; k <= l->slices; k++)
        for (int a = 0; a < l->hosts; a++)
            for (int b = a + 1; b < l->hosts; b++) connect_pair(&l->fds[k][a][b], &l->fds[k][b][a]);
}

void part_hosts(const layout *l) {
    for (int q = 0; q < l->first[l->hosts]; q++)
        for (int k = 0; k < BELLS; k++) close(l->bells[k][q]);
    for (int k = 0; k <= l->slices; k++)
        for (int a = 0; a < l->hosts; a++)
            for (int b = 0; b < l->hosts; b++)
                if (a != b) close(l->fds[k][a][b]);
}

void link_up(pyhvd_window *w, pyhvd_exchange *e, const layout *l, int rank, uint8_t *const *areas,
             size_t capacity) {
    int host = l->host_of[rank], local = rank - l->first[host], ranks = l->ranks[host];
    look_at(w, areas + l->first[host], local, ranks, capacity, capacity);
    memset(e, 0, sizeof *e);
    e->host = host;
    e->hosts = l->hosts;
    e->slices = l->slices;
    e->first = pyhvd_first_slice(e, local, ranks);
    e->owned = pyhvd_first_slice(e, local + 1, ranks) - e->first;
    if (!pyhvd_exchange_init(e, capacity)) fail("no memory");
    for (int own = 0; own < e->owned; own++)
        for (int g = 0; g < l->hosts; g++)
            if (g != host)
                pyhvd_link_open(&e->links[own * l->hosts + g], l->fds[e->first + own][host][g]);
    memcpy(e->bells, &l->bells[0][l->first[host]], (size_t)ranks * sizeof(int));
    w->slots = PYHVD_ACROSS_SLOTS;
    w->exchange = e;
}

/* Find a host's neighbours. */
static void find_neighbours(pyhvd_agreement *a, const layout *l, int host) {
    if (pyhvd_host_tree_init(&a->tree, (uint32_t)host, (uint32_t)l->hosts, l->parents))
        fail("no tree");
}

void *make_table(const layout *l, int host, uint32_t slots) {
    pyhvd_agreement a;
    find_neighbours(&a, l, host);
    return make(pyhvd_ready_table_bytes(l->ranks[host], slots) + pyhvd_agreement_bytes(&a, slots));
}

void attach_table(pyhvd_ready_table *t, pyhvd_agreement *a, void *base, const layout *l, int rank,
                  uint32_t slots) {
    int host = l->host_of[rank], first = l->first[host], size = l->ranks[host];
    pyhvd_ready_table_attach(t, base, rank - first, size, slots);
    find_neighbours(a, l, host);
    a->messages = -1;
    for (int g = 0; g < l->hosts; g++) a->fds[g] = g == host ? -1 : l->fds[l->slices][host][g];
    for (int q = 0; q < size; q++) {
        a->progress_bells[q] = l->bells[1][first + q];
        a->background_bells[q] = l->bells[2][first + q];
        a->ranks[q] = (uint32_t)(first + q);
    }
    pyhvd_agreement_attach(a, (uint8_t *)base + pyhvd_ready_table_bytes(size, slots), slots);
    t->agreement = a;
    if (!t->rank) pyhvd_agreement_clear(a, slots);
}
