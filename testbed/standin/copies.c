/*
 * More of the stand-in, for benchmarks/register: copies, kernels, graphs, and memory that a second
 * process maps. Compiled together with libcuda.c. Everything is done at once and by this CPU: it
 * shows that calls come in an order and with arguments that make sense, and no figure at all.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };
enum { LOCATION_DEVICE = 1, LOCATION_HOST_NUMA = 3, PINNED = 1, POSIX_FD = 1, READ_WRITE = 3 };

/* cuda.h: CUmemLocation and CUmemAllocationProp, as far as they are looked at. */
struct Location { int type, id; };
struct Properties { int type, handle_types; struct Location location; };
struct Access { struct Location location; int flags; };

static unsigned char kernel_module, kernel, graph_to_run;

CUresult cuMemAlloc_v2(uintptr_t *pointer, size_t size)
{
    *pointer = (uintptr_t)malloc(size);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemFree_v2(uintptr_t pointer)
{
    free((void *)pointer);
    return SUCCESS;
}

CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags)
{
    (void)flags;
    *pointer = calloc(1, size);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemFreeHost(void *pointer)
{
    free(pointer);
    return SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *stream)
{
    (void)stream;
    memcpy((void *)to, from, size);
    return SUCCESS;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *stream)
{
    (void)stream;
    memcpy(to, (const void *)from, size);
    return SUCCESS;
}

CUresult cuStreamSynchronize(void *stream)
{
    return stream ? SUCCESS : INVALID_VALUE;
}

CUresult cuModuleLoadData(void **module, const void *image)
{
    *module = &kernel_module;
    return strstr(image, ".entry nothing") ? SUCCESS : INVALID_VALUE;
}

CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = &kernel;
    return module == &kernel_module && !strcmp(name, "nothing") ? SUCCESS : INVALID_VALUE;
}

CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, void *stream, void **parameters,
                        void **extra)
{
    (void)shared, (void)parameters, (void)extra;
    return function == &kernel && gx * gy * gz * bx * by * bz == 1 && stream ? SUCCESS
                                                                             : INVALID_VALUE;
}

CUresult cuGraphInstantiateWithFlags(void **runnable, void *graph, unsigned long long flags)
{
    (void)flags;
    *runnable = &graph_to_run;
    return graph ? SUCCESS : INVALID_VALUE;
}

CUresult cuGraphLaunch(void *runnable, void *stream)
{
    return runnable == &graph_to_run && stream ? SUCCESS : INVALID_VALUE;
}

/* A handle is a descriptor plus one: memory that any process can map that was sent it. */
CUresult cuMemCreate(unsigned long long *handle, size_t size, const struct Properties *asked,
                     unsigned long long flags)
{
    if (asked->type != PINNED || asked->location.type != LOCATION_HOST_NUMA || flags
        || asked->handle_types != POSIX_FD)
        return INVALID_VALUE;
    int fd = memfd_create("standin", MFD_CLOEXEC);
    *handle = fd + 1;
    return fd >= 0 && ftruncate(fd, size) == 0 ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemRelease(unsigned long long handle)
{
    return close(handle - 1) == 0 ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(int *fd, unsigned long long handle, int type,
                                      unsigned long long flags)
{
    *fd = fcntl(handle - 1, F_DUPFD_CLOEXEC, 3);
    return *fd >= 0 && type == POSIX_FD && !flags ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemImportFromShareableHandle(unsigned long long *handle, void *fd, int type)
{
    int copy = fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 3);
    *handle = copy + 1;
    return copy >= 0 && type == POSIX_FD ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemAddressReserve(uintptr_t *pointer, size_t size, size_t alignment, uintptr_t hint,
                             unsigned long long flags)
{
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *pointer = (uintptr_t)at;
    return at != MAP_FAILED && !alignment && !hint && !flags ? SUCCESS : OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(uintptr_t pointer, size_t size)
{
    return munmap((void *)pointer, size) == 0 ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemMap(uintptr_t pointer, size_t size, size_t offset, unsigned long long handle,
                  unsigned long long flags)
{
    void *at = mmap((void *)pointer, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle - 1, 0);
    return at != MAP_FAILED && !offset && !flags ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemUnmap(uintptr_t pointer, size_t size)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)pointer, size, PROT_NONE, flags, -1, 0) != MAP_FAILED ? SUCCESS
                                                                              : INVALID_VALUE;
}

CUresult cuMemSetAccess(uintptr_t pointer, size_t size, const struct Access *wishes, size_t count)
{
    for (size_t n = 0; n < count; n++) {
        int type = wishes[n].location.type;
        if (wishes[n].flags != READ_WRITE || (type != LOCATION_DEVICE && type != LOCATION_HOST_NUMA))
            return INVALID_VALUE;
    }
    return mprotect((void *)pointer, size, PROT_READ | PROT_WRITE) == 0 ? SUCCESS : INVALID_VALUE;
}
