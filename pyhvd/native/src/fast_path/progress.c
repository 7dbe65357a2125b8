/* The progress engine of the fast path; progress.h states the invariants. */
#include "fast_path/progress.h"

#include <stdlib.h>
#include <string.h>

#include "common/cpu_affinity.h"
#include "agreement/agreement.h"
#include "kernels/kernels.h"
#include "results/pool.h"
#include "window/parts.h"

#define GATHER_NS 50000 /* between two checks whether calls still arrive */
/* Longest wait for the table's lock. Its holders need microseconds, unless one was stopped. */
#define TABLE_LOCK_NS 2000000
/* After calls that no thread waited for: time between two looks for new calls, number of looks. */
#define WATCH_NS 100000
#define WATCH_LOOKS 3
/* Looks after the last call, a cycle time apart. Then the thread sleeps until a call rings. */
#define LAZY_LOOKS 20
/* On one of several hosts: yields before a sleep, each with an attempt to receive. In a prototype,
 * spinning before each, or fewer of them, was slower where ranks share cores. */
#define HOST_YIELDS 200
/* While the message of the next list is missing, time between two looks for it: on several hosts a
 * ring may be lost, as it may pass a host that has closed its path. */
#define LIST_LOOK_NS 20000000

_Thread_local int pyhvd_must_not_wait;

/* ---- set-up ---- */

int pyhvd_fast_path_init(pyhvd_fast_path *path) {
    pyhvd_progress *p = &path->progress;
    size_t slots = path->setup.table.slots;
    pthread_mutex_init(&path->submissions.mutex, NULL);
    path->submissions.refused_end = &path->submissions.refused;
    path->setup.table.closed = &path->closed;
    p->spin_budget = PYHVD_YIELDS;
    p->left_core_ns = pyhvd_first_leave_ns(path->setup.table.size);
    p->pending = calloc(slots, sizeof *p->pending);
    p->left_behind = calloc(slots, sizeof *p->left_behind);
    p->srcs = calloc(slots, sizeof *p->srcs);
    p->dsts = calloc(slots, sizeof *p->dsts);
    p->starts = calloc(slots + 1, sizeof *p->starts);
    return p->pending && p->left_behind && p->srcs && p->dsts && p->starts;
}

void pyhvd_fast_path_free(pyhvd_fast_path *path) {
    for (uint32_t set = 0; set < PYHVD_MAX_SETS; set++) free(path->setup.sets[set].tensors);
    free(path->progress.pending);
    free(path->progress.left_behind);
    free(path->progress.srcs);
    free(path->progress.dsts);
    free(path->progress.starts);
    free(path->submissions.held);
    pthread_mutex_destroy(&path->submissions.mutex);
}

int pyhvd_fast_path_open(pyhvd_fast_path *path, uint32_t set, pyhvd_window *window) {
    pyhvd_path_set *s = &path->setup.sets[set];
    free(s->tensors); /* those of an earlier set with this number */
    s->tensors = calloc(path->setup.table.slots, sizeof *s->tensors);
    s->window = window;
    return s->tensors != NULL;
}

/* ---- submissions ---- */

int pyhvd_fast_path_grow(pyhvd_fast_path *path) {
    pyhvd_submissions *s = &path->submissions;
    uint32_t wanted = s->capacity ? 2 * s->capacity : 64;
    pyhvd_call **held = realloc(s->held, wanted * sizeof *held);
    if (!held) return 0;
    s->held = held;
    s->capacity = wanted;
    return 1;
}

/* Remove a call from the held ones. */
static void let_go(pyhvd_submissions *s, const pyhvd_call *call) {
    uint32_t kept = 0, n = atomic_load_explicit(&s->held_count, memory_order_relaxed);
    for (uint32_t k = 0; k < n; k++)
        if (s->held[k] != call) s->held[kept++] = s->held[k];
    atomic_store_explicit(&s->held_count, kept, memory_order_release);
}

/* Append a call to the refused ones. */
static void refuse(pyhvd_submissions *s, pyhvd_call *call) {
    call->state = PYHVD_REFUSED;
    call->next_refused = NULL;
    *s->refused_end = call;
    s->refused_end = &call->next_refused;
}

/* Remove a call from the refused ones. */
static void unrefuse(pyhvd_submissions *s, const pyhvd_call *call) {
    pyhvd_call **at = &s->refused;
    while (*at != call) at = &(*at)->next_refused;
    *at = call->next_refused;
    if (!*at) s->refused_end = at;
}

/* The recalled marks of this rank in a set, by word. */
static _Atomic uint64_t *recalled_of(const pyhvd_fast_path *path, uint32_t set) {
    const pyhvd_ready_table *table = &path->setup.table;
    return table->recalled + pyhvd_words_of_rank(table, (uint32_t)table->rank, set);
}

/* Whether marks may be recalled: those of turn slots, and with several hosts all. */
static int may_be_recalled(const pyhvd_fast_path *path) {
    return path->setup.table.agreement || path->setup.table.has_turns;
}

/* Forget which marks of this turn were recalled: a later turn must not be refused for them. */
static void forget_recalled(const pyhvd_fast_path *path, const pyhvd_call *call) {
    for (uint32_t k = 0; k < call->slots.n; k++) {
        uint32_t slot = call->slots.ids[k];
        atomic_fetch_and_explicit(recalled_of(path, call->set) + slot / 64,
                                  ~((uint64_t)1 << (slot % 64)), memory_order_relaxed);
    }
}

int pyhvd_fast_path_take(pyhvd_fast_path *path, pyhvd_call *call) {
    pyhvd_submissions *s = &path->submissions;
    int was = call->state;
    if (was == PYHVD_HELD) let_go(s, call);
    if (was == PYHVD_REFUSED) unrefuse(s, call);
    if (was == PYHVD_MARKED && may_be_recalled(path)) forget_recalled(path, call);
    call->state = PYHVD_TAKEN;
    return was;
}

int pyhvd_fast_path_withdraw(pyhvd_fast_path *path, pyhvd_call *call) {
    if (call->state != PYHVD_HELD) return 0;
    pyhvd_fast_path_take(path, call);
    atomic_store_explicit(&call->finished, call->started, memory_order_release);
    return 1;
}

/* ---- wake-ups ---- */

/* Wake the threads that wait without the progress lock. */
static void wake_waiters(pyhvd_fast_path *path) {
    atomic_fetch_add_explicit(&path->wakeups, 1, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&path->waiters, memory_order_relaxed))
        pyhvd_futex_wake(&path->wakeups, 1);
}

/* Wake the holder of this rank's progress lock, so that it looks at the log again. */
static void wake_progress(pyhvd_fast_path *path) {
    atomic_thread_fence(memory_order_seq_cst);
    pyhvd_ready_table_wake_progress(&path->setup.table, path->setup.table.rank);
}

static void wake_background(pyhvd_fast_path *path, uint32_t reasons) {
    pyhvd_ready_table_wake(&path->setup.table, path->setup.table.rank, reasons);
}

static int is_closed(const pyhvd_fast_path *path) {
    return atomic_load_explicit(&path->closed, memory_order_acquire) != 0;
}

/* ---- flushing ---- */

/* The bytes of this rank's own lane, whose parts lie one behind the other. */
static int64_t lane_bytes(const pyhvd_local_move *move) {
    const pyhvd_part *last = move->sources + move->source_count - 1;
    return move->source_count ? last->offset + last->bytes : 0;
}

/* Stage the tensors of a call that this rank has marked. */
static void stage(pyhvd_fast_path *path, const pyhvd_call *call) {
    const pyhvd_cached_tensor *tensors = path->setup.sets[call->set].tensors;
    for (uint32_t k = 0; !call->arrays && k < call->slots.n; k++) {
        const pyhvd_cached_tensor *tensor = &tensors[call->slots.ids[k]];
        const pyhvd_local_move *move = tensor->move;
        if ((move ? move->total : tensor->count) > PYHVD_PAYLOAD) continue;
        int64_t count = move ? lane_bytes(move) : tensor->count;
        pyhvd_payload_item item = {
            .set = (uint16_t)call->set,
            .slot = call->slots.ids[k],
            .count = (uint32_t)count,
            .dtype = (uint16_t)(move ? PYHVD_UINT8 : tensor->dtype),
            .op = (uint16_t)(move ? PYHVD_GATHERS : tensor->op),
            .postscale = tensor->postscale,
        };
        uint8_t *values = pyhvd_payloads_stage(&path->setup.table, item);
        if (values && !move)
            pyhvd_pack(values, &call->srcs[k], &count, 1, tensor->dtype, tensor->op,
                       tensor->prescale);
        else if (values && count)
            copy_parts(move->sources, move->source_count, (int)move->sources->lane, 0, count,
                       values, call->srcs[k], INTO_LANE);
    }
}

/* Mark the held calls ready; return 0 if the table's lock cannot be taken within TABLE_LOCK_NS. */
static int try_flush(pyhvd_fast_path *path, int64_t now) {
    pyhvd_ready_table *table = &path->setup.table;
    pyhvd_submissions *s = &path->submissions;
    pyhvd_ranks audience = {{0}};
    uint32_t from[PYHVD_MAX_SETS], to[PYHVD_MAX_SETS] = {0}, refusals = 0;
    pthread_mutex_lock(&s->mutex);
    uint32_t n = atomic_load_explicit(&s->held_count, memory_order_relaxed);
    /* A stopped rank may hold the table's lock. Do not keep the mutex meanwhile: the watchdog needs
     * it too. */
    if (!n || !pyhvd_ready_table_lock(table, TABLE_LOCK_NS)) {
        pthread_mutex_unlock(&s->mutex);
        return !n;
    }
    int64_t traced = pyhvd_trace_now(path->setup.trace);
    int stages = table->agreement && n <= PYHVD_PAYLOAD_SLOTS;
    if (table->agreement) pyhvd_payloads_tidy(table);
    for (uint32_t k = 0; k < n; k++) {
        pyhvd_call *call = s->held[k];
        const uint32_t *slots = call->slots.ids;
        call->marked_ns = now;
        if (!pyhvd_ready_table_mark_ready(table, call->set, &call->slots, now)) {
            refuse(s, call);
            refusals++;
            continue;
        }
        call->state = PYHVD_MARKED;
        if (stages && call->slots.n <= PYHVD_PAYLOAD_SLOTS) stage(path, call);
        pyhvd_trace_add(path->setup.trace, PYHVD_MARKED_READY, traced, call->set, slots[0], 0, 0);
        uint32_t first = slots[0] / 64, end = slots[call->slots.n - 1] / 64 + 1;
        if (!to[call->set] || first < from[call->set]) from[call->set] = first;
        if (end > to[call->set]) to[call->set] = end;
    }
    for (uint32_t set = 0; set < PYHVD_MAX_SETS; set++)
        if (to[set]) pyhvd_ready_table_match(table, set, from[set], to[set], now, &audience);
    pyhvd_ready_table_unlock(table, &audience);
    atomic_store_explicit(&s->held_count, 0, memory_order_release);
    pthread_mutex_unlock(&s->mutex);
    if (table->agreement) pyhvd_agreement_send(table);
    wake_progress(path); /* `unlock` wakes the other ranks only */
    if (refusals) wake_background(path, PYHVD_WAKE_REFUSED);
    return 1;
}

int pyhvd_fast_path_flush(pyhvd_fast_path *path, int all, int64_t now) {
    if (!all && !atomic_load_explicit(&path->submissions.held_count, memory_order_acquire))
        return 1;
    while (!try_flush(path, now)) {
        if (!all || is_closed(path)) return 0;
        pyhvd_nap(TABLE_LOCK_NS);
    }
    return 1;
}

/* ---- batches ---- */

static int fits_with(const pyhvd_fast_path *path, const pyhvd_cached_tensor *a,
                     const pyhvd_cached_tensor *b) {
    return a->verb == PYHVD_ALLREDUCE && b->verb == PYHVD_ALLREDUCE && a->dtype == b->dtype &&
           a->op == b->op && a->prescale == b->prescale && a->postscale == b->postscale &&
           a->direct == b->direct && !a->call->arrays && !b->call->arrays &&
           (!path->setup.groups_alone || a->call == b->call ||
            !(a->call->grouped || b->call->grouped));
}

/* Copy what a rank gets of a tensor out of a result that has all of it; return the result's bytes. */
static size_t copy_result(const pyhvd_cached_tensor *tensor, int64_t source, int64_t target,
                          const uint8_t *from) {
    const pyhvd_local_move *m = tensor->move;
    const pyhvd_portions *p = tensor->portions;
    size_t item = pyhvd_itemsize(tensor->dtype);
    int64_t first = p ? p->starts[p->own] : 0, end = p ? p->starts[p->own + 1] : tensor->count;
    if (!m) {
        if (target)
            memcpy((void *)(intptr_t)target, from + (size_t)first * item,
                   (size_t)(end - first) * item);
        return (size_t)tensor->count * item;
    }
    pyhvd_job_cursor own = {.local = m, .source = source, .target = target};
    copy_own(&own, m->own_bytes);
    for (size_t k = 0; k < m->target_count; k++) {
        const pyhvd_part *part = &m->targets[k];
        memcpy((void *)(intptr_t)(target + part->address),
               from + m->starts[part->lane] + part->offset, (size_t)part->bytes);
    }
    return (size_t)m->total;
}

/* Copy the results that lie beside the log entry, before its place is used again. */
static void copy_results(pyhvd_fast_path *path) {
    const pyhvd_progress *p = &path->progress;
    const uint8_t *from = pyhvd_payloads_results(&path->setup.table, p->log_position);
    for (uint32_t k = 0; k < p->pending_count; k++) {
        const pyhvd_cached_tensor *tensor = &path->setup.sets[p->set].tensors[p->pending[k]];
        const pyhvd_call *call = tensor->call;
        size_t bytes = copy_result(tensor, call->srcs[tensor->index], call->dsts[tensor->index],
                                   from);
        from += pyhvd_payload_room(bytes);
    }
}

/* Begin a log entry: list its slots. */
static void begin_entry(pyhvd_fast_path *path, const pyhvd_log_entry *entry) {
    pyhvd_progress *p = &path->progress;
    p->set = entry->set;
    p->last_rank = entry->last_rank;
    p->log_position = atomic_load_explicit(&rank_state_of(path)->cursor, memory_order_relaxed);
    p->trace_ready = pyhvd_trace_now(path->setup.trace);
    p->pending_count = p->next = 0;
    for (uint32_t w = entry->first; w < entry->end; w++)
        for (uint64_t bits = entry->words[w - entry->first]; bits; bits &= bits - 1)
            p->pending[p->pending_count++] = w * 64 + (uint32_t)__builtin_ctzll(bits);
    p->has_results = entry->has_results != 0;
    if (p->has_results) copy_results(path);
}

/* Return whether all tensors of a call fit into one batch, apart from their total size. `alike`
 * keeps the answer until one of the call's slots is installed again. */
static int is_alike(const pyhvd_fast_path *path, pyhvd_call *call) {
    const pyhvd_cached_tensor *tensors = path->setup.sets[call->set].tensors;
    const pyhvd_slot_list *slots = &call->slots;
    if (call->alike == PYHVD_UNKNOWN) {
        uint32_t k = 1;
        while (k < slots->n && fits_with(path, &tensors[slots->ids[0]], &tensors[slots->ids[k]]))
            k++;
        call->alike = k == slots->n ? PYHVD_ALIKE : PYHVD_UNLIKE;
    }
    return call->alike == PYHVD_ALIKE;
}

/* Return the grouped call that makes up the whole log entry and fits into one batch, or that has a turn
 * slot, which is a batch by itself; or NULL. */
static pyhvd_call *find_whole_call(const pyhvd_fast_path *path, const pyhvd_cached_tensor *first) {
    const pyhvd_progress *p = &path->progress;
    pyhvd_call *call = first->call;
    const pyhvd_slot_list *slots = &call->slots;
    if (call->arrays) return call;
    if (!call->grouped || p->next || slots->n != p->pending_count) return NULL;
    if (memcmp(p->pending, slots->ids, slots->n * sizeof *slots->ids)) return NULL;
    if ((size_t)call->starts[slots->n] * pyhvd_itemsize(first->dtype) > p->threshold) return NULL;
    return is_alike(path, call) ? call : NULL;
}

/* Choose the first pending tensor and all that fit with it, in slot order, so that every rank
 * chooses alike. Move the others behind them, in order. Return how many tensors were chosen. */
static uint32_t gather_batch(pyhvd_fast_path *path) {
    pyhvd_progress *p = &path->progress;
    const pyhvd_cached_tensor *tensors = path->setup.sets[p->set].tensors;
    const pyhvd_cached_tensor *first = &tensors[p->pending[p->next]];
    size_t item = pyhvd_itemsize(first->dtype), bytes = 0;
    /* Only allreduces share a batch. */
    uint32_t end = first->verb == PYHVD_ALLREDUCE ? p->pending_count : p->next + 1;
    uint32_t n = 0, kept = end;
    p->starts[0] = 0;
    for (uint32_t k = p->next; k < end; k++) {
        const pyhvd_cached_tensor *tensor = &tensors[p->pending[k]];
        size_t more = (size_t)tensor->count * item;
        if (n && (!fits_with(path, first, tensor) || bytes + more > p->threshold)) {
            /* Into scratch memory, as `pending` is still being read; backwards from its end. */
            p->left_behind[--kept] = p->pending[k];
            continue;
        }
        p->srcs[n] = tensor->call->srcs[tensor->index];
        p->dsts[n] = tensor->call->dsts[tensor->index];
        p->starts[n + 1] = p->starts[n] + tensor->count;
        p->pending[p->next + n++] = p->pending[k];
        bytes += more;
    }
    for (uint32_t k = p->next + n, from = end; k < end; k++) p->pending[k] = p->left_behind[--from];
    return n;
}

/* Choose the next batch. */
static void load_batch(pyhvd_fast_path *path) {
    pyhvd_progress *p = &path->progress;
    pyhvd_trace *trace = path->setup.trace;
    const pyhvd_cached_tensor *first = &path->setup.sets[p->set].tensors[p->pending[p->next]];
    pyhvd_call *whole = p->whole_call = find_whole_call(path, first);
    uint32_t n = p->batch_count = whole ? whole->slots.n : gather_batch(path);
    p->job = (pyhvd_job){
        .srcs = whole ? whole->srcs : p->srcs,
        .dsts = whole ? whole->dsts : p->dsts,
        .starts = whole ? whole->starts : p->starts,
        .n = whole && whole->arrays ? whole->arrays : n,
        .dtype = first->dtype,
        .op = first->op,
        .prescale = first->prescale,
        .postscale = first->postscale,
        .direct = first->direct,
        .portions = first->portions,
    };
    if (first->move)
        pyhvd_window_begin_move(&p->cursor, first->move, first->moves, first->move_count,
                                p->job.srcs[0], p->job.dsts[0]);
    else
        pyhvd_window_begin(&p->cursor, &p->job);
    p->ready_ns = pyhvd_is_timed(&path->counters) ? pyhvd_now() : 0;
    p->trace_begin = pyhvd_trace_now(trace);
    for (uint32_t k = 0; p->trace_begin && k < n; k++)
        pyhvd_trace_add(trace, PYHVD_READY, p->trace_ready, p->set, p->pending[p->next + k],
                        p->log_position, p->last_rank);
    __atomic_store_n(&p->running, 1, __ATOMIC_RELAXED);
}

/* Tell the sampler of the batch that was just carried out. */
static void sample_batch(pyhvd_fast_path *path, uint64_t bytes) {
    pyhvd_progress *p = &path->progress;
    pyhvd_sampler *sampler = path->setup.sampler;
    uint32_t most = 0;
    if (!sampler || !pyhvd_sampler_counts(sampler)) return;
    for (uint32_t k = 0; k < p->batch_count; k++) {
        pyhvd_cached_tensor *tensor = &path->setup.sets[p->set].tensors[p->pending[p->next + k]];
        if (tensor->sample != sampler->sample) tensor->times = 0;
        tensor->sample = sampler->sample;
        if (++tensor->times > most) most = tensor->times;
    }
    if (pyhvd_sampler_count(sampler, bytes, most)) wake_background(path, PYHVD_WAKE_WORK);
}

static void count_batch(pyhvd_fast_path *path) {
    const pyhvd_progress *p = &path->progress;
    pyhvd_counters *counters = &path->counters;
    uint64_t bytes = (uint64_t)p->job.starts[p->job.n] * pyhvd_itemsize(p->job.dtype);
    sample_batch(path, bytes);
    pyhvd_observe(&counters->tensors, p->job.n, 1);
    pyhvd_observe(&counters->bytes, bytes, 1);
    const pyhvd_cached_tensor *first = &path->setup.sets[p->set].tensors[p->pending[p->next]];
    pyhvd_add(&counters->verb_tensors[first->verb], p->job.n);
    pyhvd_add(&counters->verb_bytes[first->verb], bytes);
    if (p->ready_ns) pyhvd_observe(&counters->execution, (uint64_t)(pyhvd_now() - p->ready_ns), 1);
}

/* Tell the C code that has submitted a call. */
static void tell_submitter(pyhvd_ending ending) {
    pyhvd_must_not_wait++;
    ending.done(ending.context, ending.error);
    pyhvd_must_not_wait--;
}

/* End n tensors of a call. When the call's last tensor has ended, its arrays may be freed. */
static void end_tensors(pyhvd_fast_path *path, pyhvd_call *call, uint32_t n) {
    if (atomic_fetch_sub_explicit(&call->unfinished, n, memory_order_acq_rel) != n) return;
    /* Read before `finished` is stored: then the call may be submitted again. */
    pyhvd_ending ending = call->ending;
    uint64_t turn = atomic_fetch_add_explicit(&call->finished, 1, memory_order_release) + 1;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&call->notify_turn, memory_order_relaxed) >= turn)
        wake_background(path, PYHVD_WAKE_DONE);
    if (ending.done) tell_submitter(ending);
}

/* End the tensors of the batch. */
static void end_batch(pyhvd_fast_path *path) {
    const pyhvd_progress *p = &path->progress;
    const pyhvd_cached_tensor *tensors = path->setup.sets[p->set].tensors;
    for (uint32_t k = 0, n; k < p->batch_count; k += n) {
        const uint32_t *slots = &p->pending[p->next + k];
        pyhvd_call *call = tensors[slots[0]].call;
        n = p->whole_call ? p->batch_count : 1;
        while (k + n < p->batch_count && tensors[slots[n]].call == call) n++;
        int64_t agreed = p->ready_ns - call->marked_ns;
        uint32_t ended = call->arrays ? call->arrays : n;
        if (p->ready_ns)
            pyhvd_observe(&path->counters.negotiation, agreed > 0 ? (uint64_t)agreed : 0, ended);
        end_tensors(path, call, ended);
    }
}

void pyhvd_fast_path_settle(pyhvd_fast_path *path, pyhvd_call *call) {
    end_tensors(path, call, 1);
    wake_waiters(path);
    wake_progress(path);
}

/* A rank has aborted the window of a set, or another host is lost: close this rank's path. */
static void give_up(pyhvd_fast_path *path, uint32_t set) {
    atomic_store_explicit(&path->aborted, set + 1, memory_order_release);
    pyhvd_fast_path_end(path);
    wake_background(path, PYHVD_WAKE_ABORTED);
}

/* Continue the batch until it has ended. Return PYHVD_LATE after a sleep in the window without
 * news, and PYHVD_CLOSED if the window was aborted. */
static int run_batch(pyhvd_fast_path *path) {
    pyhvd_progress *p = &path->progress;
    pyhvd_window *window = path->setup.sets[p->set].window;
    window->interruptible = 1;
    window->never_yields = p->alone && !atomic_load_explicit(&path->waiters, memory_order_relaxed);
    int status = p->has_results ? PYHVD_OK : pyhvd_window_proceed(window, &p->cursor);
    window->interruptible = window->never_yields = 0;
    if (status == PYHVD_LATER) return PYHVD_LATE;
    if (status) {
        give_up(path, p->set);
        return PYHVD_CLOSED;
    }
    pyhvd_trace_add(path->setup.trace, PYHVD_CARRIED, p->trace_begin, p->set, p->batch_count,
                    p->log_position, p->last_rank);
    count_batch(path);
    end_batch(path);
    p->next += p->batch_count;
    __atomic_store_n(&p->running, 0, __ATOMIC_RELAXED);
    wake_waiters(path);
    return PYHVD_DONE;
}

/* ---- progress, under the progress lock ---- */

/* Whether a log entry has begun and not ended. */
static int is_under_way(const pyhvd_fast_path *path) {
    return path->progress.running || path->progress.next < path->progress.pending_count;
}

static int is_finished(const pyhvd_call *call, uint64_t turn) {
    return call && pyhvd_call_finished(call, turn);
}

/* Leave a core that another rank works on, if another core is free. */
static void leave_shared_core(pyhvd_fast_path *path) {
    const pyhvd_ready_table *table = &path->setup.table;
    uint32_t taken[PYHVD_MAX_LOCAL];
    int n = 0;
    for (int q = 0; q < table->size; q++)
        if (q != table->rank)
            taken[n++] = atomic_load_explicit(&table->shared->rank_states[q].core,
                                              memory_order_relaxed);
    // cppcheck-suppress uninitvar - the first n elements are set
    pyhvd_leave_shared_core(taken, n, &path->progress.left_core_ns, &rank_state_of(path)->core);
}

/* As await_entry, on one of several hosts: handle what arrives, and sleep on the connections. */
static int await_hosts(pyhvd_fast_path *path, const pyhvd_call *call, uint64_t turn,
                       int64_t until) {
    pyhvd_ready_table *table = &path->setup.table;
    pyhvd_rank_state *mine = rank_state_of(path);
    for (int yields = 0; yields < HOST_YIELDS; yields++) {
        if (pyhvd_ready_table_behind(table) || is_finished(call, turn)) return PYHVD_DONE;
        if (!pyhvd_agreement_receive(table)) sched_yield();
    }
    atomic_store_explicit(&mine->progress_asleep, PYHVD_POLLS, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    int64_t left = until - pyhvd_now();
    if (!pyhvd_agreement_receive(table) && !pyhvd_ready_table_behind(table) &&
        !is_finished(call, turn) && !is_closed(path) && !pyhvd_agreement_lost(table) && left > 0)
        pyhvd_agreement_poll(table, table->agreement->progress_bells[table->rank],
                             left < PYHVD_NAP ? left : PYHVD_NAP);
    atomic_store_explicit(&mine->progress_asleep, 0, memory_order_relaxed);
    return pyhvd_now() < until ? PYHVD_DONE : PYHVD_LATE;
}

/* Wait until the log has another entry, or the call has ended, or for one sleep. Return PYHVD_LATE
 * if the time `until` has passed. */
static int await_entry(pyhvd_fast_path *path, const pyhvd_call *call, uint64_t turn,
                       int64_t until) {
    const pyhvd_ready_table *table = &path->setup.table;
    pyhvd_progress *p = &path->progress;
    pyhvd_rank_state *mine = rank_state_of(path);
    int yields = p->spin_budget;
    if (table->agreement) return await_hosts(path, call, turn, until);
    do {
        for (int spin = 0; spin < PYHVD_SPINS; spin++) {
            if (pyhvd_ready_table_behind(table) || is_finished(call, turn)) return PYHVD_DONE;
            pyhvd_pause();
        }
        leave_shared_core(path);
    } while (pyhvd_yield(&yields));
    uint32_t seen = atomic_load_explicit(&mine->progress_bell, memory_order_acquire);
    atomic_store_explicit(&mine->progress_asleep, PYHVD_SLEEPS, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    int64_t before = pyhvd_now(), left = until - before;
    if (!pyhvd_ready_table_behind(table) && !is_finished(call, turn) && !is_closed(path) &&
        left > 0)
        pyhvd_futex_wait(&mine->progress_bell, seen, left < PYHVD_NAP ? left : PYHVD_NAP);
    p->spin_budget = pyhvd_next_spin_budget(p->spin_budget, pyhvd_now() - before);
    atomic_store_explicit(&mine->progress_asleep, 0, memory_order_relaxed);
    return pyhvd_now() < until ? PYHVD_DONE : PYHVD_LATE;
}

/* Carry out the log's entries until the call has ended; without a call, to the end of the log. */
static int make_progress(pyhvd_fast_path *path, const pyhvd_call *call, uint64_t turn,
                         int64_t until) {
    for (;;) {
        if (is_closed(path)) return PYHVD_CLOSED;
        if (is_under_way(path)) {
            if (!path->progress.running) load_batch(path);
            int status = run_batch(path);
            if (status == PYHVD_DONE) continue;
            if (status == PYHVD_LATE && call && pyhvd_now() < until) continue;
            return status;
        }
        if (is_finished(call, turn)) return PYHVD_DONE;
        const pyhvd_log_entry *entry = pyhvd_ready_table_next(&path->setup.table);
        if (entry && entry->kind == PYHVD_LIST) return PYHVD_AT_LIST;
        if (entry) {
            begin_entry(path, entry);
            pyhvd_ready_table_advance(&path->setup.table);
        } else if (pyhvd_agreement_lost(&path->setup.table)) {
            give_up(path, PYHVD_MAX_SETS);
        } else if (!call) {
            return PYHVD_IDLING;
        } else if (await_entry(path, call, turn, until) == PYHVD_LATE) {
            return PYHVD_LATE;
        }
    }
}

static int try_lock_progress(pyhvd_fast_path *path) {
    pyhvd_rank_state *mine = rank_state_of(path);
    uint32_t unlocked = 0;
    if (atomic_load_explicit(&mine->progress_lock, memory_order_relaxed) ||
        !atomic_compare_exchange_strong_explicit(&mine->progress_lock, &unlocked, 1,
                                                 memory_order_acquire, memory_order_relaxed))
        return 0;
    pyhvd_publish_core(&mine->core);
    return 1;
}

/* Release the progress lock; return whether work is left. Wake the waiters, as one of them must
 * take the lock. Exception: do not wake them if a response list is next in the log. No waiter can
 * pass it; each would take the lock, release it and wake the others, on cores that the ranks need
 * to send the list. */
static int unlock_progress(pyhvd_fast_path *path, int status) {
    /* Read under the lock. A rank that later appends to the log finds `progress_lock` clear, and
     * wakes the background thread. */
    int left_over = is_under_way(path);
    atomic_store_explicit(&path->left_over, (uint32_t)left_over, memory_order_relaxed);
    atomic_store_explicit(&rank_state_of(path)->progress_lock, 0, memory_order_release);
    /* Both branches have a fence between the store above and the look at the log below. */
    if (status != PYHVD_AT_LIST)
        wake_waiters(path);
    else
        atomic_thread_fence(memory_order_seq_cst);
    return left_over || pyhvd_ready_table_behind(&path->setup.table);
}

static void stop_progress(pyhvd_fast_path *path, int status) {
    if (unlock_progress(path, status)) pyhvd_fast_path_ring(path);
}

/* ---- waiting ---- */

/* Sleep until the holder of the progress lock wakes the waiters. */
static void await_wakeup(pyhvd_fast_path *path, uint32_t seen, const pyhvd_call *call,
                         uint64_t turn, int64_t until) {
    int64_t left = until - pyhvd_now();
    atomic_fetch_add_explicit(&path->waiters, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (!is_finished(call, turn) && !is_closed(path) && left > 0)
        pyhvd_futex_wait(&path->wakeups, seen, left < PYHVD_NAP ? left : PYHVD_NAP);
    atomic_fetch_sub_explicit(&path->waiters, 1, memory_order_relaxed);
}

int pyhvd_fast_path_wait(pyhvd_fast_path *path, const pyhvd_call *call, uint64_t turn, int64_t now,
                         int64_t ns) {
    int64_t until = now + ns;
    for (int round = 0;; round++) {
        uint32_t seen = atomic_load_explicit(&path->wakeups, memory_order_acquire);
        if (is_finished(call, turn)) return PYHVD_DONE;
        if (is_closed(path)) return PYHVD_CLOSED;
        if (round && (now = pyhvd_now()) >= until) return PYHVD_LATE;
        int locked = try_lock_progress(path);
        /* Flush only after the attempt to take the lock. If this thread has the lock, the rank whose
         * marks complete a batch sees that, and does not wake this rank's background thread too. */
        if (!pyhvd_fast_path_flush(path, 0, now)) {
            if (locked) stop_progress(path, PYHVD_IDLING);
            pyhvd_nap(GATHER_NS);
            continue;
        }
        if (locked) {
            int status = make_progress(path, call, turn, until);
            /* Read `wakeups` under the lock: no other thread has passed the response list yet, and
             * the thread that passes it will change `wakeups`. */
            seen = atomic_load_explicit(&path->wakeups, memory_order_acquire);
            stop_progress(path, status);
            if (status == PYHVD_DONE) return PYHVD_DONE;
            if (status == PYHVD_LATE) continue;
            if (status == PYHVD_AT_LIST) wake_background(path, PYHVD_WAKE_LIST);
        }
        await_wakeup(path, seen, call, turn, until);
    }
}

/* ---- the background thread ---- */

/* Flush if no more calls arrive, or if the cycle time is over. Return after how long (ns) to call
 * again, or 0 if no call is held. */
static int64_t gather(pyhvd_fast_path *path) {
    pyhvd_background *b = &path->background;
    uint32_t holds = atomic_load_explicit(&path->submissions.hold_count, memory_order_acquire);
    int64_t now = pyhvd_now(), since = b->settled_ns;
    int settled = holds == b->seen_holds;
    if (!settled) b->idle_looks = 0;
    b->seen_holds = holds;
    if (!atomic_load_explicit(&path->submissions.held_count, memory_order_acquire)) {
        b->settled_ns = now;
        b->found_held = 0;
        if (!settled) b->unattended = 0;
        return 0;
    }
    /* Another batch costs little on one host, but a message and an exchange between hosts: begin the
     * cycle with the calls, not with the last look, which may be long ago. */
    if (!b->found_held && path->setup.table.agreement) since = b->settled_ns = now;
    b->found_held = 1;
    if (!settled && now - since < b->cycle_ns) return GATHER_NS;
    b->found_held = 0;
    b->settled_ns = now;
    b->unattended = 1;
    b->quiet_looks = 0;
    return pyhvd_fast_path_flush(path, 0, now) ? 0 : GATHER_NS;
}

/* Choose how long the background thread sleeps (ns). Set `watches` to whether it will soon look
 * for new calls by itself, so that they need not ring.
 *   1. After calls that no thread waited for, it looks WATCH_LOOKS times, soon.
 *   2. After calls with waiting threads, it then looks LAZY_LOOKS times, rarely: those threads make
 *      progress themselves, and need the core.
 *   3. Otherwise it sleeps until it is woken. */
static int64_t choose_nap(pyhvd_background *b, int64_t nap, int64_t left, int *watches) {
    int64_t lazy = b->cycle_ns < WATCH_NS ? WATCH_NS : b->cycle_ns;
    *watches = 1;
    if (nap) return nap < left ? nap : left;
    if (b->quiet_looks++ < WATCH_LOOKS) return WATCH_NS < left ? WATCH_NS : left;
    if (!b->unattended && b->idle_looks++ < LAZY_LOOKS) return lazy < left ? lazy : left;
    *watches = 0;
    return left;
}

/* Free results that nobody has used for long; return how long to sleep, at most `ns`, until more can be. */
static int64_t tidy_results(int64_t ns) {
    if (!atomic_load_explicit(&pyhvd_pool_buffers, memory_order_relaxed)) return ns;
    int64_t now = pyhvd_now(), again = pyhvd_pool_tidy(now);
    return again && again - now < ns ? again - now : ns;
}

/* Sleep until woken, at most `ns`. First set `background_asleep`, then look for work again: work
 * that arrives later finds the flag set, and wakes the thread. Return whether a message may have come. */
static int rest(pyhvd_fast_path *path, int64_t ns, int watches) {
    const pyhvd_ready_table *table = &path->setup.table;
    pyhvd_rank_state *mine = rank_state_of(path);
    uint32_t seen = atomic_load_explicit(&mine->background_bell, memory_order_acquire);
    atomic_store_explicit(&path->background_watches, (uint32_t)watches, memory_order_relaxed);
    int attended = !path->background.unattended && watches, messages = 0;
    uint32_t polls = attended ? PYHVD_POLLS_BELL : PYHVD_POLLS;
    atomic_store_explicit(&mine->background_asleep, table->agreement ? polls : PYHVD_SLEEPS,
                          memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    int locked = atomic_load_explicit(&mine->progress_lock, memory_order_relaxed) != 0;
    int busy = atomic_load_explicit(&mine->wake_reasons, memory_order_relaxed) ||
               (!watches &&
                atomic_load_explicit(&path->submissions.held_count, memory_order_relaxed)) ||
               (!locked && atomic_load_explicit(&path->left_over, memory_order_relaxed)) ||
               (!locked && pyhvd_ready_table_behind(table) && !path->background.known_list);
    if (!busy && table->agreement)
        messages = pyhvd_agreement_rest(table, attended, ns);
    else if (!busy)
        pyhvd_futex_wait(&mine->background_bell, seen, ns);
    atomic_store_explicit(&mine->background_asleep, 0, memory_order_relaxed);
    return messages;
}

/* Make progress if no other thread does. Return whether a response list is next in the log that the
 * background thread does not know of. */
static int progress_alone(pyhvd_fast_path *path) {
    /* If another thread holds the lock, it wakes this thread if it leaves work over. */
    int left_over = atomic_load_explicit(&path->left_over, memory_order_relaxed) != 0;
    if (path->setup.table.agreement) pyhvd_agreement_receive(&path->setup.table);
    if ((!left_over && !pyhvd_ready_table_behind(&path->setup.table)) || !try_lock_progress(path))
        return 0;
    path->progress.alone = 1;
    int status = make_progress(path, NULL, 0, 0);
    path->progress.alone = 0;
    uint64_t known = path->background.known_list, number = 0;
    if (status == PYHVD_AT_LIST) number = pyhvd_ready_table_next(&path->setup.table)->number;
    path->background.known_list = number;
    unlock_progress(path, status);
    return status == PYHVD_AT_LIST && number != known;
}

/* Refuse the calls whose marks were recalled. Each is in flight, in the turn of its mark: it ends
 * only when Python has taken it. */
static void refuse_recalled(pyhvd_fast_path *path) {
    pyhvd_submissions *s = &path->submissions;
    pthread_mutex_lock(&s->mutex);
    for (uint32_t set = 0; set < PYHVD_MAX_SETS; set++)
        for (uint32_t w = 0; w < path->setup.table.words; w++) {
            _Atomic uint64_t *recalled = recalled_of(path, set) + w;
            if (!atomic_load_explicit(recalled, memory_order_relaxed)) continue;
            uint64_t bits = atomic_exchange_explicit(recalled, 0, memory_order_relaxed);
            for (; bits; bits &= bits - 1) {
                uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(bits);
                pyhvd_call *call = path->setup.sets[set].tensors[slot].call;
                /* Otherwise another slot of the grouped call came first; or Python took the call at the
                 * same moment, and it may be gone. */
                if (call && call->state == PYHVD_MARKED) refuse(s, call);
            }
        }
    pthread_mutex_unlock(&s->mutex);
}

uint32_t pyhvd_fast_path_sleep(pyhvd_fast_path *path, int64_t ns) {
    int awaits_list = path->setup.table.agreement && path->background.known_list;
    if (awaits_list && (ns < 0 || ns > LIST_LOOK_NS)) ns = LIST_LOOK_NS;
    int64_t until = pyhvd_after(ns);
    if (!path->background.short_turns) pyhvd_take_short_turns();
    path->background.short_turns = pyhvd_must_not_wait = 1;
    for (;;) {
        uint32_t reasons = atomic_exchange_explicit(&rank_state_of(path)->wake_reasons, 0,
                                                    memory_order_acquire);
        if (reasons & PYHVD_WAKE_RECALLED) refuse_recalled(path);
        if (reasons) return reasons;
        if (!is_closed(path) && progress_alone(path)) return PYHVD_WAKE_LIST;
        int64_t nap = gather(path), left = until - pyhvd_now();
        if (left <= 0) return 0;
        int watches;
        nap = choose_nap(&path->background, nap, left, &watches);
        if (!watches) nap = tidy_results(nap);
        if (rest(path, nap, watches)) return PYHVD_WAKE_WORK;
    }
}

int pyhvd_fast_path_announce(pyhvd_fast_path *path, uint64_t number, const pyhvd_ranks *audience) {
    int written = pyhvd_ready_table_append_list(&path->setup.table, number, audience);
    if (written) wake_progress(path); /* the table wakes the other ranks only */
    return written;
}

int pyhvd_fast_path_enter(pyhvd_fast_path *path, uint64_t number) {
    path->background.known_list = 0;
    if (is_closed(path) || !try_lock_progress(path)) return 0;
    int status = make_progress(path, NULL, 0, 0);
    if (status == PYHVD_AT_LIST && pyhvd_ready_table_next(&path->setup.table)->number == number)
        return 1;
    stop_progress(path, status);
    return 0;
}

void pyhvd_fast_path_leave(pyhvd_fast_path *path) {
    pyhvd_ready_table_advance(&path->setup.table);
    stop_progress(path, PYHVD_IDLING);
}

void pyhvd_fast_path_keep_lock(pyhvd_fast_path *path) {
    while (!try_lock_progress(path)) pyhvd_nap(GATHER_NS);
}

void pyhvd_fast_path_end(pyhvd_fast_path *path) {
    atomic_store_explicit(&path->closed, 1, memory_order_release);
    wake_waiters(path);
    wake_progress(path);
}
