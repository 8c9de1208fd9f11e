/* What the rivals share: a clock, threads that start together, and an end in one line of JSON. */
#ifndef HOSTPREP_RIVALS_COMMON_H
#define HOSTPREP_RIVALS_COMMON_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* asm-generic/mman-common.h, Linux 5.14 */
#endif

enum { MAX_THREADS = 256 };

typedef struct {
    char *begin;
    size_t size;
    size_t piece;
    void (*work)(char *begin, size_t size);
    pthread_barrier_t *start;
} job;

static inline void die(const char *what) {
    fprintf(stderr, "rival: %s: %s\n", what, strerror(errno));
    exit(1);
}

static inline double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static inline size_t number(const char *text) {
    char *end;
    size_t value = strtoull(text, &end, 10);
    if (*end != '\0' || value == 0) {
        fprintf(stderr, "rival: not a positive number: %s\n", text);
        exit(2);
    }
    return value;
}

static inline void populate_write(char *begin, size_t size) {
    while (madvise(begin, size, MADV_POPULATE_WRITE) != 0)
        if (errno != EINTR && errno != EAGAIN)
            die("MADV_POPULATE_WRITE");
}

static inline void *run_job(void *argument) {
    job *mine = argument;
    pthread_barrier_wait(mine->start);
    for (size_t done = 0; done < mine->size; done += mine->piece) {
        size_t left = mine->size - done;
        mine->work(mine->begin + done, left < mine->piece ? left : mine->piece);
    }
    return NULL;
}

/* Split [begin, begin + size) evenly in units of `unit` bytes, one share a thread. All threads
 * exist before any works. Returns the seconds from before the first thread was made. */
static inline double in_threads(char *begin, size_t size, size_t unit, size_t count, size_t piece,
                                void (*work)(char *, size_t)) {
    pthread_t threads[MAX_THREADS];
    job jobs[MAX_THREADS];
    pthread_barrier_t start;
    size_t units = size / unit;
    double begin_s = now_s();
    if (count > MAX_THREADS)
        count = MAX_THREADS;
    pthread_barrier_init(&start, NULL, (unsigned)count);
    for (size_t i = 0; i < count; i++) {
        size_t share = units / count + (i < units % count);
        jobs[i] = (job){begin, share * unit, piece ? piece : share * unit, work, &start};
        if (pthread_create(&threads[i], NULL, run_job, &jobs[i]) != 0)
            die("pthread_create");
        begin += share * unit;
    }
    for (size_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return now_s() - begin_s;
}

static inline char *map_file(const char *path, size_t size) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
        die(path);
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        die("mmap");
    close(fd);
    return memory;
}

static inline void tell(double took_s) { printf("{\"took_s\": %.9f}\n", took_s); }

#endif
