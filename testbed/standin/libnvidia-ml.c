/*
 * A stand-in for libnvidia-ml.so.1 (NVML): the three calls of what watches a GPU's memory, as
 * nvidia-smi does. It proves order and what happens on failures, never speed. Declarations follow
 * the NVML API reference; the driver's lock is the one of libcuda.c.
 *
 * Environment (read at every call):
 *   STANDIN_NVML_LOG  file to append one line to for each call: pid call(arguments)=result
 *   STANDIN_LOCK      file whose flock stands for the driver's lock, across processes
 *   STANDIN_DEVICES   number of devices (1)
 *   STANDIN_NVML      result of nvmlInit_v2 (0)
 *   STANDIN_NVML_LOST 1: the GPU has fallen off the bus
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef struct Device *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;

/* nvml.h: enum nvmlReturn_enum */
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, GPU_IS_LOST = 15 };
#define MOST_DEVICES 16

struct Device { unsigned index; };
static struct Device devices[MOST_DEVICES];
static int is_ready;

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtol(text, NULL, 10) : otherwise;
}

static nvmlReturn_t told(nvmlReturn_t result, const char *format, ...)
{
    const char *path = getenv("STANDIN_NVML_LOG");
    char line[256];
    va_list arguments;
    if (path == NULL)
        return result;
    int length = snprintf(line, sizeof line, "%d ", getpid());
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - length, format, arguments);
    va_end(arguments);
    length += snprintf(line + length, sizeof line - length, "=%d\n", result);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0) {
        if (write(fd, line, length) != length)
            abort();
        close(fd);
    }
    return result;
}

nvmlReturn_t nvmlInit_v2(void)
{
    nvmlReturn_t result = (nvmlReturn_t)setting("STANDIN_NVML", SUCCESS);
    is_ready = result == SUCCESS;
    return told(result, "init()");
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    nvmlReturn_t result = is_ready ? SUCCESS : UNINITIALIZED;
    if (result == SUCCESS && (index >= setting("STANDIN_DEVICES", 1) || index >= MOST_DEVICES))
        result = INVALID_ARGUMENT;
    if (result == SUCCESS) {
        devices[index].index = index;
        *device = &devices[index];
    }
    return told(result, "handle(%u)", index);
}

/* Waits for whoever registers, as nvidia-smi was seen to (memory research, section 1.3). */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    const char *path = getenv("STANDIN_LOCK");
    uintptr_t offset = (uintptr_t)device - (uintptr_t)devices;
    if (!is_ready)
        return told(UNINITIALIZED, "memory()");
    if (memory == NULL || offset >= sizeof devices || offset % sizeof *devices != 0)
        return told(INVALID_ARGUMENT, "memory()");
    if (setting("STANDIN_NVML_LOST", 0))
        return told(GPU_IS_LOST, "memory(%u)", device->index);
    if (path != NULL) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        while (fd >= 0 && flock(fd, LOCK_EX) != 0 && errno == EINTR)
            ;
        if (fd >= 0)
            close(fd);
    }
    *memory = (nvmlMemory_t){141ULL << 30, 140ULL << 30, 1ULL << 30};
    return told(SUCCESS, "memory(%u)", device->index);
}
