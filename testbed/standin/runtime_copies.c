/*
 * Preloaded into LMCache's process (LD_PRELOAD): copies that its native code asks of CUDA's runtime
 * are done at once by this CPU, and written down. The cutting into pieces is LMCache's own.
 *
 *   STANDIN_COPIES_LOG   file to append one line to for each copy: TO FROM SIZE, in hexadecimal
 *
 * torch looks for a device before it has a stream: it gets one that nothing looks into.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Stream { long device, id; }; /* c10::Stream, as the x86-64 ABI returns it */

struct Stream _ZN3c104cuda20getCurrentCUDAStreamEa(signed char device)
{
    struct Stream stream = {0, 0};
    (void)device;
    return stream;
}

void *_ZNK3c104cuda10CUDAStream6streamEv(const struct Stream *stream)
{
    (void)stream;
    return NULL;
}

signed char _ZN3c104cuda14ExchangeDeviceEa(signed char device)
{
    return device;
}

signed char _ZN3c104cuda14MaybeSetDeviceEa(signed char device)
{
    return device;
}

int _ZN3c104cuda9GetDeviceEPa(signed char *device)
{
    *device = 0;
    return 0;
}

int cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

static void copy(void *to, const void *from, size_t size)
{
    const char *path = getenv("STANDIN_COPIES_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%lx %lx %zx\n", (unsigned long)to, (unsigned long)from, size);
        fclose(log);
    }
    memcpy(to, from, size);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream)
{
    (void)kind;
    (void)stream;
    copy(to, from, size);
    return 0;
}

/* As of CUDA 13; before, a pointer to the index that failed came last but one. */
int cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes,
                         size_t count, void *attributes, size_t *places, size_t kinds, void *stream)
{
    (void)attributes;
    (void)places;
    (void)kinds;
    (void)stream;
    for (size_t index = 0; index < count; index++)
        copy(to[index], from[index], sizes[index]);
    return 0;
}
