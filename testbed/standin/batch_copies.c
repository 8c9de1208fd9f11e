/*
 * cuMemcpyBatchAsync, by which vLLM's SimpleCPUOffloadConnector copies. Compiled together with
 * libcuda.c. Done at once, by memcpy: "device" memory is host memory here, as on vLLM's CPU
 * platform.
 *
 * It refuses what the real one may refuse too: a range of which a part lies in one registration
 * and the rest does not. Counts go to the log: batch(copies,registered)=result.
 */
#include <stdint.h>
#include <string.h>

typedef int CUresult;

enum { SUCCESS = 0, INVALID_VALUE = 1 };

int standin_registered(uintptr_t start, size_t size);
void standin_log_batch(size_t copies, size_t registered, CUresult result);

/* CUDA 12.8: cuda.h. The attributes say in which order sources are read; here it is now. */
CUresult cuMemcpyBatchAsync(uintptr_t *to, uintptr_t *from, size_t *sizes, size_t count,
                            void *attributes, size_t *attribute_indexes, size_t attribute_count,
                            size_t *failed, void *stream)
{
    size_t registered = 0;
    CUresult result = SUCCESS;
    (void)attributes, (void)attribute_indexes, (void)attribute_count, (void)stream;
    for (size_t n = 0; result == SUCCESS && n < count; n++) {
        int source = standin_registered(from[n], sizes[n]);
        int target = standin_registered(to[n], sizes[n]);
        registered += (source == 1) + (target == 1);
        if (source < 0 || target < 0) {
            result = INVALID_VALUE;
            *failed = n;
        } else {
            memcpy((void *)to[n], (void *)from[n], sizes[n]);
        }
    }
    standin_log_batch(count, registered, result);
    return result;
}
