/* Reports, counts of calls, vector clocks, memory and its accesses. fake_cuda.h states the invariants.
 *
 * Each block of memory has a list of accesses: those that a later access may conflict with. Two accesses conflict when they
 * overlap and at least one writes. The later one must know the earlier one: its clock at the earlier one's component must
 * have reached the earlier one's time.
 */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;

struct access {
    struct access *next;
    uint64_t first, end;
    int writes, component;
    uint32_t time;
    struct fake_site site;
};

struct block {
    struct block *next;
    uint64_t address;
    size_t bytes;
    int is_host, device, freed;
    struct fake_site made, free_site;
    struct access *accesses;
};

static struct block *blocks;
static size_t kept_bytes;
static uint32_t component_times[FAKE_CLOCKS];
static char component_used[FAKE_CLOCKS];
static char *texts;
static size_t n_text;
static long n_calls;
static struct {
    char name[48];
    long count;
} counts[192];
static int n_counts;
static int hosts_are_separate;
static struct fake_clock common_host, handed[64];
static int common_component = -1;
static _Thread_local struct fake_clock *own_host;
static _Thread_local int own_component = -1;
static _Thread_local char thread_label[48];

/* Reports */

static void count_call(const char *call) {
    size_t length = strlen(call);
    if (length > 3 && !strcmp(call + length - 3, "_v2")) length -= 3;
    for (int k = 0; k < n_counts; k++) {
        if (!strncmp(counts[k].name, call, length) && !counts[k].name[length]) {
            counts[k].count++;
            return;
        }
    }
    if (n_counts < 192 && length < 48) {
        memcpy(counts[n_counts].name, call, length);
        counts[n_counts++].count = 1;
    }
}

struct fake_site fake_enter(const char *call, void *from) {
    pthread_mutex_lock(&fake_lock);
    struct fake_site site = {.call = call, .from = from, .number = ++n_calls};
    memcpy(site.label, thread_label, sizeof site.label);
    count_call(call);
    return site;
}

CUresult fake_leave(CUresult result) {
    pthread_mutex_unlock(&fake_lock);
    return result;
}

static int write_site(char *text, size_t size, const struct fake_site *site) {
    Dl_info info;
    if (!site || !site->call) return snprintf(text, size, "none");
    if (!dladdr(site->from, &info) || !info.dli_fname) {
        return snprintf(text, size, "[%s] %s, call %ld", site->label, site->call, site->number);
    }
    const char *file = strrchr(info.dli_fname, '/');
    long offset = (long)((char *)site->from - (char *)info.dli_fbase);
    return snprintf(text, size, "[%s] %s, call %ld, from %s+0x%lx %s", site->label, site->call,
                    site->number, file ? file + 1 : info.dli_fname, offset,
                    info.dli_sname ? info.dli_sname : "");
}

void fake_report(const char *kind, const struct fake_site *first, const struct fake_site *second,
                 const char *what) {
    char one[256], two[256], line[768];
    write_site(one, sizeof one, first);
    write_site(two, sizeof two, second);
    int length = snprintf(line, sizeof line, "%s: %s; first: %s; second: %s\n", kind, what, one,
                          two);
    if (n_text > 1 << 20) return;
    texts = realloc(texts, n_text + (size_t)length + 1);
    memcpy(texts + n_text, line, (size_t)length + 1);
    n_text += (size_t)length;
    const char *path = getenv("FAKE_CUDA_REPORTS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fputs(line, file);
        fclose(file);
    }
}

const char *fake_cuda_reports(void) {
    static _Thread_local char *copy;
    fake_cuda_drain(5000);
    pthread_mutex_lock(&fake_lock);
    free(copy);
    copy = strdup(n_text ? texts : "");
    pthread_mutex_unlock(&fake_lock);
    return copy;
}

/* Return how often call was called; all calls together for NULL. */
long fake_cuda_count(const char *call) {
    long found = 0;
    pthread_mutex_lock(&fake_lock);
    if (!call) found = n_calls;
    for (int k = 0; call && k < n_counts; k++) {
        if (!strcmp(counts[k].name, call)) found = counts[k].count;
    }
    pthread_mutex_unlock(&fake_lock);
    return found;
}

/* Forget reports and counts; memory and its accesses remain. */
void fake_cuda_reset(void) {
    fake_cuda_drain(5000);
    pthread_mutex_lock(&fake_lock);
    n_text = 0;
    n_calls = 0;
    n_counts = 0;
    memset(counts, 0, sizeof counts);
    pthread_mutex_unlock(&fake_lock);
}

void fake_cuda_label(const char *label) {
    snprintf(thread_label, sizeof thread_label, "%s", label);
}

struct fake_site fake_cuda_called(const char *call, void *from) {
    struct fake_site site = fake_enter(call, from);
    fake_leave(0);
    return site;
}

void fake_cuda_report(const char *kind, const struct fake_site *first,
                      const struct fake_site *second, const char *what) {
    pthread_mutex_lock(&fake_lock);
    fake_report(kind, first, second, what);
    pthread_mutex_unlock(&fake_lock);
}

/* Clocks */

void fake_join(struct fake_clock *into, const struct fake_clock *from) {
    for (int k = 0; k < FAKE_CLOCKS; k++) {
        if (from->at[k] > into->at[k]) into->at[k] = from->at[k];
    }
}

int fake_new_component(void) {
    for (int k = 0; k < FAKE_CLOCKS; k++) {
        if (!component_used[k]) {
            component_used[k] = 1;
            return k;
        }
    }
    fprintf(stderr, "fake CUDA: more than %d streams and host threads at once\n", FAKE_CLOCKS);
    abort();
}

uint32_t fake_tick(int component) { return ++component_times[component]; }

void fake_end_component(int component) { component_used[component] = 0; }

static int host_component(void) {
    int *component = hosts_are_separate ? &own_component : &common_component;
    if (*component < 0) *component = fake_new_component();
    return *component;
}

/* All host threads are one, unless a test separates them: the fake cannot see their locks. */
struct fake_clock *fake_host_clock(void) {
    if (!hosts_are_separate) return &common_host;
    if (!own_host) own_host = calloc(1, sizeof *own_host);
    return own_host;
}

static uint32_t tick_host(void) {
    int component = host_component();
    return fake_host_clock()->at[component] = fake_tick(component);
}

void fake_cuda_separate_hosts(int separate) {
    pthread_mutex_lock(&fake_lock);
    hosts_are_separate = separate;
    pthread_mutex_unlock(&fake_lock);
}

/* What this thread has done is before what a thread does after fake_cuda_host_acquire() of the same key. */
void fake_cuda_host_release(unsigned key) {
    pthread_mutex_lock(&fake_lock);
    fake_join(&handed[key % 64], fake_host_clock());
    pthread_mutex_unlock(&fake_lock);
}

void fake_cuda_host_acquire(unsigned key) {
    pthread_mutex_lock(&fake_lock);
    fake_join(fake_host_clock(), &handed[key % 64]);
    pthread_mutex_unlock(&fake_lock);
}

/* Memory */

static struct block *find_block(uint64_t address) {
    struct block *found = NULL;
    for (struct block *each = blocks; each; each = each->next) {
        if (address >= each->address && address < each->address + each->bytes &&
            (!found || !each->freed))
            found = each;
    }
    return found;
}

int fake_is_ours(uint64_t address, int *is_host) {
    struct block *found = find_block(address);
    if (found && is_host) *is_host = found->is_host;
    return found != NULL;
}

int fake_device_of(uint64_t address) {
    struct block *found = find_block(address);
    return found ? found->device : -1;
}

uint64_t fake_allocate(size_t bytes, int is_host, int device, const struct fake_site *site) {
    struct block *made = calloc(1, sizeof *made);
    void *memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (!memory || !made) {
        free(made);
        free(memory);
        return 0;
    }
    memset(memory, 0xA5, bytes);
    *made = (struct block){.next = blocks,
                           .address = (uint64_t)memory,
                           .bytes = bytes,
                           .is_host = is_host,
                           .made = *site,
                           .device = device};
    blocks = made;
    return made->address;
}

static void forget_accesses(struct block *block) {
    while (block->accesses) {
        struct access *first = block->accesses;
        block->accesses = first->next;
        free(first);
    }
}

/* Release freed memory when there is much of it, and no work that could still use it. */
static void release_kept(void) {
    if (kept_bytes < (size_t)64 << 20 || fake_busy_mark()) return;
    for (struct block **at = &blocks; *at;) {
        struct block *each = *at;
        if (!each->freed) {
            at = &each->next;
            continue;
        }
        *at = each->next;
        free((void *)each->address);
        free(each);
    }
    kept_bytes = 0;
}

static void mark_freed(struct block *block, const struct fake_site *site) {
    block->freed = 1;
    block->free_site = *site;
    kept_bytes += block->bytes;
    forget_accesses(block);
    release_kept();
}

/* Accesses */

struct who {
    const struct fake_clock *clock;
    const struct fake_site *site;
    int component;
};

static int covers(const struct access *new, const struct access *old) {
    return new->first <= old->first && old->end <= new->end &&
           (new->writes || (!old->writes && old->component == new->component));
}

/* Compare with the accesses of a block and add the new one; drop those which it makes superfluous. */
static void check_block(struct block *block, const struct who *who, const struct access *new,
                        const char *kind) {
    for (struct access **at = &block->accesses; *at;) {
        struct access *old = *at;
        int overlaps = old->first < new->end && new->first < old->end;
        int ordered = old->time <= who->clock->at[old->component];
        if (overlaps && (old->writes || new->writes) && !ordered) {
            fake_report(kind, &old->site, who->site,
                        old->writes ? "not ordered after the last write"
                                    : "not ordered after a read");
        }
        if (covers(new, old)) {
            *at = old->next;
            free(old);
        } else {
            at = &old->next;
        }
    }
    struct access *kept = malloc(sizeof *kept);
    *kept = *new;
    kept->next = block->accesses;
    block->accesses = kept;
}

static void check_range(const struct who *who, const struct fake_range *range, uint32_t time) {
    struct block *block = find_block(range->address);
    if (!range->bytes || (!block && range->may_be_foreign)) return;
    if (!block) {
        fake_report("unknown-memory", NULL, who->site, "the address is in no allocation");
    } else if (block->freed) {
        fake_report("use-after-free", &block->free_site, who->site, "the memory has been freed");
    } else if (range->address + range->bytes > block->address + block->bytes) {
        fake_report("out-of-bounds", &block->made, who->site,
                    "the range ends after its allocation");
    } else {
        struct access new = {.first = range->address,
                             .end = range->address + range->bytes,
                             .writes = range->writes,
                             .component = who->component,
                             .time = time,
                             .site = *who->site};
        check_block(block, who, &new, "unordered");
    }
}

void fake_check_item(const struct fake_item *item, const struct fake_range *range, int component) {
    struct who who = {&item->clock, &item->site, component};
    check_range(&who, range, item->clock.at[component]);
}

void fake_check_host(const struct fake_site *site, const struct fake_range *range) {
    uint32_t time = tick_host();
    struct who who = {fake_host_clock(), site, host_component()};
    check_range(&who, range, time);
}

void fake_cuda_host_access(const void *address, size_t bytes, int writes) {
    struct fake_site site = ENTER();
    struct fake_range range = {(uint64_t)address, bytes, writes, 1};
    fake_check_host(&site, &range);
    fake_leave(0);
}

static struct block *find_to_free(uint64_t address, const struct fake_site *site) {
    struct block *block = find_block(address);
    if (block && block->freed)
        fake_report("use-after-free", &block->free_site, site, "the memory is freed twice");
    return block && !block->freed && block->address == address ? block : NULL;
}

static void check_free(struct block *block, const struct who *who, uint32_t time) {
    struct access all = {.first = block->address,
                         .end = block->address + block->bytes,
                         .writes = 1,
                         .component = who->component,
                         .time = time,
                         .site = *who->site};
    check_block(block, who, &all, "freed-in-use");
    mark_freed(block, who->site);
}

/* Free memory from the host; report accesses that the host does not know to have ended. Return 0 if it is no block. */
int fake_free_now(uint64_t address, const struct fake_site *site) {
    struct block *block = find_to_free(address, site);
    uint32_t time = tick_host();
    struct who who = {fake_host_clock(), site, host_component()};
    if (block) check_free(block, &who, time);
    return block != NULL;
}

void fake_free_at(const struct fake_item *item, int component) {
    struct block *block = find_to_free(item->frees, &item->site);
    struct who who = {&item->clock, &item->site, component};
    if (block) check_free(block, &who, item->clock.at[component]);
}
