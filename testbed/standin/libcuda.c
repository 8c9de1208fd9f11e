/*
 * A stand-in for libcuda.so.1: what the register tests need of a driver, and no GPU.
 *
 * It proves order, turns and what happens on failures. It proves nothing about speed: no figure
 * taken from it is a result. cuda-python loads it as it loads the real one. The declarations
 * follow the CUDA Driver API reference; all state is the process's own, except the lock.
 *
 * Environment (read at every call, so that a test may change it):
 *   STANDIN_LOG      file to append one line to for each call: pid tid call(arguments)=result
 *   STANDIN_LOCK     file whose flock stands for the driver's lock, across processes
 *   STANDIN_SCALE    factor on the times below; 0 takes no time
 *   STANDIN_DEVICES  number of devices (1)      STANDIN_VERSION  the driver's version (13000)
 *   STANDIN_INIT     result of cuInit (0)       STANDIN_ATS      1: host page tables are used
 *   STANDIN_UNSUPPORTED  1: host memory cannot be registered at all
 *   STANDIN_READ_ONLY    0: nor as read-only
 *   STANDIN_CONTEXT  1: device 0's context is current in every thread, as where an engine's runtime
 *                    has made it so; for engines whose platform is none of CUDA's
 *   STANDIN_LOCKS    1: while a call registers or unregisters, it also holds the context's lock, and
 *                    the process's mmap_lock for reading, as pinning does (mm/gup.c): see
 *                    standin_launch, standin_fault and standin_map, which an engine's threads take
 *   STANDIN_FAIL     failures on demand, comma-separated: CALL:WHEN:CODE[:sticky], CALL register
 *                    or unregister, WHEN the n-th such call, any, base or huge (kind of pages)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct Context *CUcontext;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500, CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
};

/*
 * Nanoseconds for each MiB of one registration, pages resident. Base pages: 8 GB/s, between the
 * 8.1 GB/s of vllm issue 51414 and the 9.9 GB/s of vllm issue 51080. Huge pages: 34 GB/s, the
 * least that pegaflow issue 277 leaves for hugetlb. Taking it back: a quarter of it (503 ms and
 * 115 ms for 512 MiB, imp issue 1653). Order and behaviour hang on these; speed is not shown.
 */
#define BASE_NS_PER_MIB 131072L
#define HUGE_NS_PER_MIB 30840L
#define UNREGISTER_PART 4
#define ONE_CALL_LIMIT (1UL << 39) /* r580 and later: vllm issue 51080 */
#define MOST_RANGES 65536
#define MOST_DEVICES 16

struct Context { int device; int alive; };
struct Range { uintptr_t start, end; };

static pthread_mutex_t state_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t driver_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct Context contexts[MOST_DEVICES];
static struct Range ranges[MOST_RANGES];
static int range_count, register_calls, unregister_calls;
static int is_ready, was_forked, sticky_code;
static int capture_is_on, capture_is_broken;
static __thread CUcontext current;
static __thread int capture_mode; /* GLOBAL 0, THREAD_LOCAL 1, RELAXED 2 */

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtol(text, NULL, 10) : otherwise;
}

static void write_log(const char *format, ...)
{
    const char *path = getenv("STANDIN_LOG");
    char line[512];
    va_list arguments;
    if (path == NULL)
        return;
    int length = snprintf(line, sizeof line, "%d %ld ", getpid(), (long)syscall(SYS_gettid));
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - length, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0) {
        if (write(fd, line, length) != length)
            abort();
        close(fd);
    }
}

/* The driver's lock: one holder on the whole machine (memory research, section 1.3). */
static int take_lock(void)
{
    const char *path = getenv("STANDIN_LOCK");
    int fd = -1;
    pthread_mutex_lock(&driver_mutex);
    if (path != NULL) {
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        while (fd >= 0 && flock(fd, LOCK_EX) != 0 && errno == EINTR)
            ;
    }
    return fd;
}

static void drop_lock(int fd)
{
    if (fd >= 0)
        close(fd);
    pthread_mutex_unlock(&driver_mutex);
}

static void take_time(long nanoseconds)
{
    const char *text = getenv("STANDIN_SCALE");
    double scaled = nanoseconds * (text != NULL ? strtod(text, NULL) : 1.0);
    struct timespec left = {(time_t)(scaled / 1e9), (long)scaled % 1000000000L};
    if (scaled >= 1e9)
        left.tv_nsec = (long)(scaled - 1e9 * left.tv_sec);
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

static void in_forked_child(void)
{
    /* The real driver does not survive a fork either: every call says so (cuInit: once only). */
    was_forked = is_ready;
}

static CUresult usable(void)
{
    if (was_forked || !is_ready)
        return NOT_INITIALIZED;
    if (sticky_code)
        return sticky_code;
    if (current == NULL)
        return INVALID_CONTEXT;
    return current->alive ? SUCCESS : CONTEXT_IS_DESTROYED;
}

/* The kind of pages and the rights of the mapping around an address, as the kernel tells. */
static int look_at_mapping(uintptr_t address, int *is_huge, int *is_writable)
{
    char line[512];
    FILE *file = fopen("/proc/self/smaps", "re");
    int inside = 0, found = 0;
    if (file == NULL)
        return 0;
    *is_huge = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long start, end, size;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s ", &start, &end, rights) == 3) {
            if (inside)
                break;
            inside = address >= start && address < end;
            if (inside) {
                found = 1;
                *is_writable = rights[1] == 'w';
            }
        } else if (inside && sscanf(line, "KernelPageSize: %lu kB", &size) == 1) {
            *is_huge |= size > 64;
        } else if (inside && sscanf(line, "ShmemPmdMapped: %lu kB", &size) == 1) {
            *is_huge |= size > 0;
        }
    }
    fclose(file);
    return found;
}

static int all_is_mapped(uintptr_t start, size_t size)
{
    unsigned char seen[4096];
    long page = sysconf(_SC_PAGESIZE);
    for (size_t done = 0; done < size; done += sizeof seen * page) {
        size_t part = size - done < sizeof seen * page ? size - done : sizeof seen * page;
        if (mincore((void *)(start + done), part, seen) != 0)
            return 0;
    }
    return 1;
}

/* The failure that was ordered for this call, or 0. */
static CUresult ordered_failure(const char *call, int number, int is_huge)
{
    const char *orders = getenv("STANDIN_FAIL");
    char copy[256], *rest = copy, *order;
    if (orders == NULL)
        return SUCCESS;
    snprintf(copy, sizeof copy, "%s", orders);
    while ((order = strsep(&rest, ",")) != NULL) {
        char *name = strsep(&order, ":"), *when = strsep(&order, ":");
        char *code = strsep(&order, ":");
        if (name == NULL || when == NULL || code == NULL || strcmp(name, call) != 0)
            continue;
        if (strcmp(when, "any") != 0 && strcmp(when, is_huge ? "huge" : "base") != 0
            && atoi(when) != number)
            continue;
        if (order != NULL && strcmp(order, "sticky") == 0)
            sticky_code = atoi(code);
        return atoi(code);
    }
    return SUCCESS;
}

/* An unsafe call while a graph is captured in global mode breaks the capture, unless the calling
 * thread is in relaxed mode (CUDA Driver API, cuThreadExchangeStreamCaptureMode). */
static CUresult check_capture(void)
{
    if (!capture_is_on || capture_mode == 2)
        return SUCCESS;
    capture_is_broken = 1;
    return CAPTURE_UNSUPPORTED;
}

/*
 * The locks of one process. mmap_lock lets writers pass before later readers (rwsem): a fault waits
 * behind a thread start, an mmap or a munmap that waits for the pin.
 */
static pthread_mutex_t context_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t mmap_lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

static void pin_locks(void)
{
    if (setting("STANDIN_LOCKS", 0)) {
        pthread_mutex_lock(&context_mutex);
        pthread_rwlock_rdlock(&mmap_lock);
    }
}

static void unpin_locks(void)
{
    if (setting("STANDIN_LOCKS", 0)) {
        pthread_rwlock_unlock(&mmap_lock);
        pthread_mutex_unlock(&context_mutex);
    }
}

void standin_launch(void)
{
    pthread_mutex_lock(&context_mutex);
    pthread_mutex_unlock(&context_mutex);
}

void standin_fault(void)
{
    pthread_rwlock_rdlock(&mmap_lock);
    pthread_rwlock_unlock(&mmap_lock);
}

void standin_map(void)
{
    pthread_rwlock_wrlock(&mmap_lock);
    pthread_rwlock_unlock(&mmap_lock);
}

static struct Range *overlapping(uintptr_t start, uintptr_t end)
{
    for (int n = 0; n < range_count; n++)
        if (ranges[n].start < end && start < ranges[n].end)
            return &ranges[n];
    return NULL;
}

/* For batch_copies.c: 1 where one registration holds all of a range, 0 where none holds any. */
int standin_registered(uintptr_t start, size_t size)
{
    int answer = 0;
    pthread_mutex_lock(&state_mutex);
    struct Range *range = overlapping(start, start + size);
    if (range != NULL)
        answer = range->start <= start && start + size <= range->end ? 1 : -1;
    pthread_mutex_unlock(&state_mutex);
    return answer;
}

void standin_log_batch(size_t copies, size_t registered, CUresult result)
{
    write_log("batch(%zu,%zu)=%d", copies, registered, result);
}

static CUresult check_range(uintptr_t start, size_t size, unsigned flags, int *is_huge)
{
    int is_writable = 0;
    if (size == 0 || start == 0 || (flags & ~15U) != 0)
        return INVALID_VALUE;
    if (setting("STANDIN_UNSUPPORTED", 0))
        return NOT_SUPPORTED;
    if ((flags & 8) && !setting("STANDIN_READ_ONLY", 1))
        return NOT_SUPPORTED;
    if (size >= ONE_CALL_LIMIT)
        return OUT_OF_MEMORY;
    if (!all_is_mapped(start & ~4095UL, size) || !look_at_mapping(start, is_huge, &is_writable))
        return INVALID_VALUE;
    if (!is_writable && !(flags & 8))
        return INVALID_VALUE;
    return SUCCESS;
}

CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    uintptr_t start = (uintptr_t)address;
    int is_huge = 0, number = __sync_add_and_fetch(&register_calls, 1);
    CUresult result = usable();
    if (result == SUCCESS)
        result = check_capture();
    if (result == SUCCESS)
        result = check_range(start, size, flags, &is_huge);
    if (result == SUCCESS)
        result = ordered_failure("register", number, is_huge);
    if (result == SUCCESS) {
        pin_locks();
        int fd = take_lock();
        write_log("enter");
        pthread_mutex_lock(&state_mutex);
        if (overlapping(start, start + size) != NULL)
            result = ALREADY_REGISTERED;
        else if (range_count == MOST_RANGES)
            result = OUT_OF_MEMORY;
        else
            ranges[range_count++] = (struct Range){start, start + size};
        pthread_mutex_unlock(&state_mutex);
        if (result == SUCCESS)
            take_time((long)(size >> 20) * (is_huge ? HUGE_NS_PER_MIB : BASE_NS_PER_MIB));
        write_log("leave");
        drop_lock(fd);
        unpin_locks();
    }
    write_log("register(%#lx,%zu,%u,%d)=%d", start, size, flags,
              current != NULL ? current->device : -1, result);
    return result;
}

CUresult cuMemHostUnregister(void *address)
{
    uintptr_t start = (uintptr_t)address;
    int number = __sync_add_and_fetch(&unregister_calls, 1);
    CUresult result = usable();
    if (result == SUCCESS)
        result = check_capture();
    if (result == SUCCESS)
        result = ordered_failure("unregister", number, 0);
    if (result == SUCCESS) {
        pin_locks();
        int fd = take_lock();
        size_t size = 0;
        pthread_mutex_lock(&state_mutex);
        struct Range *range = overlapping(start, start + 1);
        if (range == NULL || range->start != start) {
            result = NOT_REGISTERED;
        } else {
            size = range->end - range->start;
            *range = ranges[--range_count];
        }
        pthread_mutex_unlock(&state_mutex);
        take_time((long)(size >> 20) * BASE_NS_PER_MIB / UNREGISTER_PART);
        drop_lock(fd);
        unpin_locks();
    }
    write_log("unregister(%#lx)=%d", start, result);
    return result;
}

CUresult cuInit(unsigned flags)
{
    static int hooked;
    CUresult result = was_forked ? NOT_INITIALIZED : (CUresult)setting("STANDIN_INIT", 0);
    if (flags != 0)
        return INVALID_VALUE;
    if (result == SUCCESS && setting("STANDIN_DEVICES", 1) == 0)
        result = NO_DEVICE;
    if (!hooked)
        pthread_atfork(NULL, NULL, in_forked_child);
    hooked = 1;
    is_ready = result == SUCCESS;
    write_log("init()=%d", result);
    return result;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = (int)setting("STANDIN_VERSION", 13000);
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    *count = (int)setting("STANDIN_DEVICES", 1);
    return is_ready && !was_forked ? SUCCESS : NOT_INITIALIZED;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= setting("STANDIN_DEVICES", 1) || ordinal >= MOST_DEVICES)
        return INVALID_DEVICE;
    *device = ordinal;
    return is_ready && !was_forked ? SUCCESS : NOT_INITIALIZED;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    snprintf(name, length, "Stand-in %d", device);
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
    memset(uuid, 0xA0, 16);
    uuid[15] = (unsigned char)device;
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = 141UL << 30;
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    long ats = setting("STANDIN_ATS", 0);
    if (device < 0 || device >= setting("STANDIN_DEVICES", 1))
        return INVALID_DEVICE;
    switch (attribute) { /* cuda.h: enum CUdevice_attribute */
    case 19: *value = 1; return SUCCESS; /* CAN_MAP_HOST_MEMORY */
    case 41: *value = 1; return SUCCESS; /* UNIFIED_ADDRESSING */
    case 88: *value = (int)ats; return SUCCESS; /* PAGEABLE_MEMORY_ACCESS */
    case 91: *value = (int)setting("STANDIN_SAME_ADDRESSES", 1); return SUCCESS; /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 99: *value = !setting("STANDIN_UNSUPPORTED", 0); return SUCCESS; /* HOST_REGISTER */
    case 100: *value = (int)ats; return SUCCESS; /* ..._USES_HOST_PAGE_TABLES */
    case 113: *value = (int)setting("STANDIN_READ_ONLY", 1); return SUCCESS; /* READ_ONLY_... */
    default: return INVALID_VALUE;
    }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    if (!is_ready || was_forked)
        return NOT_INITIALIZED;
    if (device < 0 || device >= setting("STANDIN_DEVICES", 1))
        return INVALID_DEVICE;
    contexts[device] = (struct Context){device, 1};
    *context = &contexts[device];
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    contexts[device].alive = 0;
    pthread_mutex_lock(&state_mutex);
    range_count = 0; /* what a context registered goes with it */
    pthread_mutex_unlock(&state_mutex);
    write_log("reset(%d)=0", device);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return cuDevicePrimaryCtxReset_v2(device);
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    if (!is_ready || was_forked)
        return NOT_INITIALIZED;
    if (context != NULL && !context->alive)
        return CONTEXT_IS_DESTROYED;
    current = context;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    if (current == NULL && is_ready && !was_forked && setting("STANDIN_CONTEXT", 0))
        cuDevicePrimaryCtxRetain(&current, 0);
    *context = current;
    return is_ready && !was_forked ? SUCCESS : NOT_INITIALIZED;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    CUresult result = usable();
    if (result == SUCCESS)
        *device = current->device;
    return result;
}

/* A cheap call that waits for the driver's lock, as a neighbour's does (TRT-LLM issue 17429). */
CUresult cuMemGetInfo_v2(size_t *left, size_t *total)
{
    CUresult result = usable();
    int fd = take_lock();
    *left = *total = 141UL << 30;
    drop_lock(fd);
    return result;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    write_log("capture_mode(%d)=%d", capture_mode, before);
    return SUCCESS;
}

CUresult cuStreamCreate(void **stream, unsigned flags)
{
    (void)flags;
    *stream = (void *)0x1000;
    return usable();
}

CUresult cuStreamDestroy_v2(void *stream)
{
    (void)stream;
    return SUCCESS;
}

CUresult cuStreamBeginCapture_v2(void *stream, int mode)
{
    (void)stream;
    capture_is_broken = 0;
    capture_is_on = mode == 0;
    return usable();
}

CUresult cuStreamEndCapture(void *stream, void **graph)
{
    (void)stream;
    capture_is_on = 0;
    *graph = capture_is_broken ? NULL : (void *)0x2000;
    return capture_is_broken ? CAPTURE_INVALIDATED : SUCCESS;
}

CUresult cuGraphDestroy(void *graph)
{
    (void)graph;
    return SUCCESS;
}

static const struct { int code; const char *name, *text; } errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
};

static CUresult error_word(int code, const char **word, int is_name)
{
    for (size_t n = 0; n < sizeof errors / sizeof *errors; n++)
        if (errors[n].code == code) {
            *word = is_name ? errors[n].name : errors[n].text;
            return SUCCESS;
        }
    *word = NULL;
    return INVALID_VALUE;
}

CUresult cuGetErrorName(int code, const char **name)
{
    return error_word(code, name, 1);
}

CUresult cuGetErrorString(int code, const char **text)
{
    return error_word(code, text, 0);
}

/* Callers name functions without their version: the newest that we have is the one meant. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             int *status)
{
    static const char *const suffixes[] = {"_v2", ""};
    (void)version;
    (void)flags;
    *function = NULL;
    for (size_t n = 0; *function == NULL && n < 2; n++) {
        char name[128];
        Dl_info self;
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[n]);
        if (dladdr((void *)cuInit, &self) != 0) {
            void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
            if (library != NULL) {
                *function = dlsym(library, name);
                dlclose(library);
            }
        }
    }
    if (status != NULL)
        *status = *function == NULL ? 1 : 0;
    return *function == NULL ? NOT_FOUND : SUCCESS;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
