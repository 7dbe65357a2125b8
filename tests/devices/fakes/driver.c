/* Devices, contexts, memory, copies, modules and launches. fake_cuda.h states the invariants. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PARAMETERS = 32 };

struct fake_kernel {
    struct fake_kernel *next;
    char name[128];
    int n;
    size_t sizes[MOST_PARAMETERS];
    fake_kernel_body run;
    fake_kernel_ranges ranges;
};

struct fake_module {
    int alive;
};

static struct fake_context contexts[FAKE_DEVICES];
static struct fake_kernel *kernels;
static int is_initialized;
static int allowed_ordinal = -1;
static _Thread_local CUcontext stack[16];
static _Thread_local int depth;

static int n_devices(void) {
    const char *given = getenv("FAKE_CUDA_DEVICES");
    int n = given ? atoi(given) : 2;
    return n < 0 ? 0 : n > FAKE_DEVICES ? FAKE_DEVICES : n;
}

__attribute__((constructor)) static void read_environment(void) {
    const char *given = getenv("FAKE_CUDA_ORDINAL");
    if (given) allowed_ordinal = atoi(given);
}

void fake_cuda_allow_ordinal(int ordinal) { allowed_ordinal = ordinal; }

CUcontext fake_current(void) { return depth ? stack[depth - 1] : NULL; }

/* Devices and contexts */

CUresult cuInit(unsigned flags) {
    ENTER();
    is_initialized = flags == 0;
    return fake_leave(flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
    ENTER();
    *version = 12080;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *count) {
    ENTER();
    *count = n_devices();
    return fake_leave(is_initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    if (!is_initialized) return fake_leave(CUDA_ERROR_NOT_INITIALIZED);
    if (ordinal < 0 || ordinal >= n_devices()) return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER();
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return fake_leave(CUDA_SUCCESS);
}

/* 75 and 76 are the compute capability, 16 the multiprocessors. */
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER();
    if (device < 0 || device >= n_devices()) return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 4 : 1;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    struct fake_site site = ENTER();
    if (device < 0 || device >= n_devices()) return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    if (allowed_ordinal >= 0 && device != allowed_ordinal) {
        fake_report("wrong-device", &contexts[allowed_ordinal].made, &site,
                    "a context is made on a device that is not the rank's");
    }
    contexts[device].device = device;
    if (!contexts[device].retained++) contexts[device].made = site;
    *context = &contexts[device];
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER();
    if (device < 0 || device >= n_devices()) return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    if (!contexts[device].retained) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    contexts[device].retained--;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER();
    if (!context || !context->retained || depth == 16)
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = context;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER();
    if (!depth) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (context) *context = stack[depth];
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER();
    *context = fake_current();
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER();
    if (!fake_current()) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    *device = fake_current()->device;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER();
    *least = 0;
    *greatest = -5;
    return fake_leave(CUDA_SUCCESS);
}

/* Memory */

static CUresult allocate(uint64_t *address, size_t bytes, int is_host,
                         const struct fake_site *site) {
    if (!fake_current()) return CUDA_ERROR_INVALID_CONTEXT;
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    if (fake_illegal_in_capture(site, NULL)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const char *limit = getenv("FAKE_CUDA_MOST_BYTES");
    if (limit && bytes > strtoull(limit, NULL, 10)) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = fake_allocate(bytes, is_host, fake_current()->device, site);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult release(uint64_t address, const struct fake_site *site) {
    if (fake_illegal_in_capture(site, NULL)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    fake_blocks(site, fake_busy_mark());
    return fake_free_now(address, site) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    struct fake_site site = ENTER();
    return fake_leave(allocate(address, bytes, 0, &site));
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    struct fake_site site = ENTER();
    return fake_leave(address ? release(address, &site) : CUDA_SUCCESS);
}

CUresult cuMemAllocHost_v2(void **address, size_t bytes) {
    struct fake_site site = ENTER();
    return fake_leave(allocate((uint64_t *)address, bytes, 1, &site));
}

CUresult cuMemFreeHost(void *address) {
    struct fake_site site = ENTER();
    return fake_leave(release((uint64_t)address, &site));
}

/* The memory is ready from this point of the stream on: another stream must wait for it. */
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream handle) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream || !bytes)
        return fake_leave(stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
    *address = fake_allocate(bytes, 0, stream->context->device, &site);
    struct fake_item *item = fake_new_item(&site);
    item->ranges[0] = (struct fake_range){*address, bytes, 1, 0};
    item->n_ranges = 1;
    return fake_leave(fake_queue(stream, item));
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    struct fake_item *item = fake_new_item(&site);
    item->frees = address;
    return fake_leave(fake_queue(stream, item));
}

/* 1: context, 2: type of memory (1 host, 2 device), 9: ordinal of the device. */
CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    ENTER();
    int is_host = 0, device = fake_device_of(address);
    if (device < 0 || !fake_is_ours(address, &is_host)) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (attribute == 1)
        *(CUcontext *)data = &contexts[device];
    else if (attribute == 2)
        *(unsigned *)data = is_host ? 1 : 2;
    else if (attribute == 9)
        *(int *)data = device;
    else
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    return fake_leave(CUDA_SUCCESS);
}

/* Copies */

struct copy {
    uint64_t to, from;
    size_t bytes;
    unsigned char value;
    void *staged;
};

static void run_copy(void *argument) {
    struct copy *copy = argument;
    memmove((void *)copy->to, copy->staged ? copy->staged : (void *)copy->from, copy->bytes);
}

static void release_copy(void *argument) {
    struct copy *copy = argument;
    free(copy->staged);
    free(copy);
}

/* Pageable sources are staged before the call returns; a copy to pageable memory waits for the device, as the driver does. */
static CUresult queue_copy(const struct fake_site *site, CUstream handle, struct fake_range to,
                           struct fake_range from) {
    struct fake_stream *stream = fake_find_stream(handle, site);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!from.bytes) return CUDA_SUCCESS;
    struct copy *copy = calloc(1, sizeof *copy);
    *copy = (struct copy){.to = to.address, .from = from.address, .bytes = from.bytes};
    if (from.may_be_foreign && !fake_is_ours(from.address, NULL)) {
        copy->staged = malloc(from.bytes);
        memcpy(copy->staged, (void *)from.address, from.bytes);
    }
    struct fake_item *item = fake_new_item(site);
    item->ranges[0] = from;
    item->ranges[1] = to;
    item->n_ranges = 2;
    item->run = run_copy;
    item->release = release_copy;
    item->argument = copy;
    CUresult result = fake_queue(stream, item);
    if (to.may_be_foreign && !fake_is_ours(to.address, NULL) && !stream->capture) {
        fake_blocks(site, stream->latest);
        fake_wait_mark(stream->latest);
    }
    return result;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    struct fake_site site = ENTER();
    return fake_leave(queue_copy(&site, stream, (struct fake_range){to, bytes, 1, 1},
                                 (struct fake_range){from, bytes, 0, 1}));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    struct fake_site site = ENTER();
    struct fake_range source = {(uint64_t)from, bytes, 0, 1};
    return fake_leave(queue_copy(&site, stream, (struct fake_range){to, bytes, 1, 0}, source));
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    struct fake_site site = ENTER();
    struct fake_range target = {(uint64_t)to, bytes, 1, 1};
    return fake_leave(queue_copy(&site, stream, target, (struct fake_range){from, bytes, 0, 0}));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    struct fake_site site = ENTER();
    return fake_leave(queue_copy(&site, stream, (struct fake_range){to, bytes, 1, 0},
                                 (struct fake_range){from, bytes, 0, 0}));
}

static void run_memset(void *argument) {
    struct copy *copy = argument;
    memset((void *)copy->to, copy->value, copy->bytes);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream handle) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    if (!stream) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    struct copy *copy = calloc(1, sizeof *copy);
    *copy = (struct copy){.to = to, .bytes = bytes, .value = value};
    struct fake_item *item = fake_new_item(&site);
    item->ranges[0] = (struct fake_range){to, bytes, 1, 0};
    item->n_ranges = 1;
    item->run = run_memset;
    item->release = release_copy;
    item->argument = copy;
    return fake_leave(fake_queue(stream, item));
}

/* Modules and launches */

/* Register a kernel: the bytes of its parameters, what it does, and which memory it reads and writes. */
int fake_cuda_register_kernel(const char *name, const size_t *sizes, int n, fake_kernel_body run,
                              fake_kernel_ranges ranges) {
    if (n > MOST_PARAMETERS) return CUDA_ERROR_INVALID_VALUE;
    struct fake_kernel *made = calloc(1, sizeof *made);
    snprintf(made->name, sizeof made->name, "%s", name);
    made->n = n;
    memcpy(made->sizes, sizes, (size_t)n * sizeof *sizes);
    made->run = run;
    made->ranges = ranges;
    pthread_mutex_lock(&fake_lock);
    made->next = kernels;
    kernels = made;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    struct fake_site site = ENTER();
    if (!fake_current()) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (!image) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (fake_illegal_in_capture(&site, NULL))
        return fake_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    *module = calloc(1, sizeof **module);
    (*module)->alive = 1;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuModuleUnload(CUmodule module) {
    struct fake_site site = ENTER();
    if (!module || !module->alive) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    fake_blocks(&site, fake_busy_mark());
    module->alive = 0;
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER();
    if (!module || !module->alive) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    for (struct fake_kernel *each = kernels; each; each = each->next) {
        if (!strcmp(each->name, name)) {
            *function = each;
            return fake_leave(CUDA_SUCCESS);
        }
    }
    return fake_leave(CUDA_ERROR_NOT_FOUND);
}

struct launch {
    struct fake_kernel *kernel;
    unsigned blocks, threads;
    void *parameters[MOST_PARAMETERS];
};

static int declare_launch(void *argument, struct fake_range *ranges, int most) {
    struct launch *launch = argument;
    return launch->kernel->ranges ? launch->kernel->ranges(launch->parameters, ranges, most) : 0;
}

static void run_launch(void *argument) {
    struct launch *launch = argument;
    launch->kernel->run(launch->parameters, launch->blocks, launch->threads);
}

static void release_launch(void *argument) {
    struct launch *launch = argument;
    for (int k = 0; k < launch->kernel->n; k++) free(launch->parameters[k]);
    free(launch);
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream handle,
                        void **parameters, void **extra) {
    struct fake_site site = ENTER();
    struct fake_stream *stream = fake_find_stream(handle, &site);
    (void)shared;
    if (!stream || !function) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    unsigned blocks = gx * gy * gz, threads = bx * by * bz;
    if (!blocks || !threads || threads > 1024 || extra) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    struct launch *launch = calloc(1, sizeof *launch);
    *launch = (struct launch){.kernel = function, .blocks = blocks, .threads = threads};
    for (int k = 0; k < function->n; k++) {
        launch->parameters[k] = malloc(function->sizes[k]);
        memcpy(launch->parameters[k], parameters[k], function->sizes[k]);
    }
    struct fake_item *item = fake_new_item(&site);
    item->declare = declare_launch;
    item->run = run_launch;
    item->release = release_launch;
    item->argument = launch;
    return fake_leave(fake_queue(stream, item));
}

/* Functions of a test that run as work of a stream */

struct function {
    fake_function run;
    void *argument;
    int n;
    struct fake_range ranges[];
};

static int declare_function(void *argument, struct fake_range *ranges, int most) {
    struct function *function = argument;
    int n = function->n < most ? function->n : most;
    memcpy(ranges, function->ranges, (size_t)n * sizeof *ranges);
    return n;
}

static void run_function(void *argument) {
    struct function *function = argument;
    function->run(function->argument);
}

/* Queue a function that reads and writes these ranges; name is that of its call in reports. */
CUresult fake_cuda_call(CUstream handle, const char *name, fake_function run, void *argument,
                        const struct fake_range *ranges, int n) {
    struct fake_site site = fake_cuda_called(name, __builtin_return_address(0));
    size_t bytes = (size_t)n * sizeof *ranges;
    struct function *made = malloc(sizeof *made + bytes);
    *made = (struct function){.run = run, .argument = argument, .n = n};
    memcpy(made->ranges, ranges, bytes);
    struct fake_item work = {
        .declare = declare_function, .run = run_function, .release = free, .argument = made};
    return fake_cuda_work(handle, &site, &work);
}

/* Errors */

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
};

static CUresult find_error(int code, const char **name, const char **text) {
    for (size_t k = 0; k < sizeof errors / sizeof *errors; k++) {
        if (errors[k].code != code) continue;
        if (name) *name = errors[k].name;
        if (text) *text = errors[k].text;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **name) { return find_error(code, name, NULL); }

CUresult cuGetErrorString(CUresult code, const char **text) { return find_error(code, NULL, text); }
