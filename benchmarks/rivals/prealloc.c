/* Preallocation of a memory backend as QEMU does it (util/oslib-posix.c, version 7 and later),
 * written anew: threads that start together, an even split in pages, and in each thread one
 * MADV_POPULATE_WRITE over its share, or a write to every page where the kernel is older.
 *
 *     prealloc populate|touch FILE SIZE_BYTES PAGE_BYTES THREADS
 *
 * FILE is made if it is not there (on hugetlbfs for huge pages) and is left behind. */
#include "common.h"

static size_t page_bytes;

static void touch(char *begin, size_t size) {
    for (char *page = begin; page < begin + size; page += page_bytes) {
        /* The same value back: what is in the page stays, and the page is faulted for writing. */
        volatile char *byte = page;
        *byte = *byte;
    }
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: prealloc populate|touch FILE SIZE_BYTES PAGE_BYTES THREADS\n");
        return 2;
    }
    size_t size = number(argv[3]);
    size_t threads = number(argv[5]);
    page_bytes = number(argv[4]);
    double begin_s = now_s();
    char *memory = map_file(argv[2], size);
    in_threads(memory, size, page_bytes, threads, 0,
               strcmp(argv[1], "touch") == 0 ? touch : populate_write);
    tell(now_s() - begin_s);
    return 0;
}
