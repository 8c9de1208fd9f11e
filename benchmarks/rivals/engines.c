/* How engines populate their host memory themselves, written anew after what they do:
 *
 *     engines vllm FILE SIZE_BYTES CHUNK_BYTES RANKS
 *         vLLM 0.33, SharedOffloadRegion: one shared-memory file that every rank maps whole; one
 *         process a rank, one thread in it, one MADV_POPULATE_WRITE for its slot in every row.
 *     engines trtllm SIZE_BYTES CHUNK_BYTES THREADS
 *         TensorRT-LLM, KVCacheManagerV2 HostMem: anonymous private memory with MADV_NOHUGEPAGE,
 *         chunks that several threads take in turn, MADV_POPULATE_WRITE.
 *     engines thp SIZE_BYTES THREADS
 *         TensorRT-LLM before that: anonymous private memory with MADV_HUGEPAGE, faulted page by
 *         page (by the registration, which is one thread).
 *
 * vLLM's is Python; in C it is at least as fast. Files are left behind. */
#include "common.h"
#include <sys/wait.h>

static const size_t HUGE_BYTES = 2 << 20;

static void touch_base_pages(char *begin, size_t size) {
    for (char *page = begin; page < begin + size; page += 4096)
        *(volatile char *)page = 0;
}

static char *map_anonymous(size_t size, int advice) {
    char *memory =
        mmap(NULL, size + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("mmap");
    memory += (HUGE_BYTES - (size_t)memory % HUGE_BYTES) % HUGE_BYTES;
    if (madvise(memory, size, advice) != 0)
        die("madvise");
    return memory;
}

static void populate_slots(char *memory, size_t size, size_t chunk, size_t rank, size_t ranks) {
    for (size_t at = rank * chunk; at < size; at += ranks * chunk)
        populate_write(memory + at, size - at < chunk ? size - at : chunk);
}

static void vllm(const char *path, size_t size, size_t chunk, size_t ranks) {
    int go[2], ready[2];
    char byte = 0;
    if (pipe(go) != 0 || pipe(ready) != 0)
        die("pipe");
    for (size_t rank = 0; rank < ranks; rank++) {
        pid_t pid = fork();
        if (pid < 0)
            die("fork");
        if (pid > 0)
            continue;
        char *memory = map_file(path, size);
        if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1)
            _exit(1);
        populate_slots(memory, size, chunk, rank, ranks);
        if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1)
            _exit(1);
        _exit(0);
    }
    double begin_s = 0;
    for (int phase = 0; phase < 2; phase++) {
        for (size_t rank = 0; rank < ranks; rank++)
            if (read(ready[0], &byte, 1) != 1)
                die("a rank");
        if (phase == 0)
            begin_s = now_s();
        else
            tell(now_s() - begin_s);
        for (size_t rank = 0; rank < ranks; rank++)
            if (write(go[1], &byte, 1) != 1)
                die("pipe");
    }
    while (wait(NULL) > 0)
        ;
}

typedef struct {
    char *memory;
    size_t size, chunk;
    size_t next;
} queue;

static void *take_chunks(void *argument) {
    queue *all = argument;
    for (;;) {
        size_t at = __atomic_fetch_add(&all->next, all->chunk, __ATOMIC_RELAXED);
        if (at >= all->size)
            return NULL;
        size_t left = all->size - at;
        populate_write(all->memory + at, left < all->chunk ? left : all->chunk);
    }
}

static void trtllm(size_t size, size_t chunk, size_t count) {
    pthread_t threads[MAX_THREADS];
    double begin_s = now_s();
    queue all = {map_anonymous(size, MADV_NOHUGEPAGE), size, chunk, 0};
    if (count > MAX_THREADS)
        count = MAX_THREADS;
    for (size_t i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, take_chunks, &all) != 0)
            die("pthread_create");
    for (size_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    tell(now_s() - begin_s);
}

static void thp(size_t size, size_t count) {
    double begin_s = now_s();
    char *memory = map_anonymous(size, MADV_HUGEPAGE);
    in_threads(memory, size, HUGE_BYTES, count, 0, touch_base_pages);
    tell(now_s() - begin_s);
}

int main(int argc, char **argv) {
    if (argc == 6 && strcmp(argv[1], "vllm") == 0)
        vllm(argv[2], number(argv[3]), number(argv[4]), number(argv[5]));
    else if (argc == 5 && strcmp(argv[1], "trtllm") == 0)
        trtllm(number(argv[2]), number(argv[3]), number(argv[4]));
    else if (argc == 4 && strcmp(argv[1], "thp") == 0)
        thp(number(argv[2]), number(argv[3]));
    else {
        fprintf(stderr, "usage: engines vllm FILE SIZE CHUNK RANKS | trtllm SIZE CHUNK THREADS"
                        " | thp SIZE THREADS\n");
        return 2;
    }
    return 0;
}
