/* Records what a process writes to its log and what it syncs, in the order in which it happened,
 * so that a test can put together what a disk may hold after a power cut at any moment.
 *
 * Preloaded. Follows files named sessions.db, sessions.db-wal and acknowledged; each record goes to
 * the file that RECORD names: kind, file, offset, length, then the bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { WRITE = 1, TRUNCATE = 2, SYNC = 3 };
enum { FDS = 4096 };

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static unsigned char followed[FDS]; /* 0: not followed; else the file and one */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int file_of(const char *path) {
    static const char *const names[] = {"sessions.db", "sessions.db-wal", "acknowledged"};
    const char *last = strrchr(path, '/');
    last = last ? last + 1 : path;
    for (int i = 0; i < 3; i++)
        if (strcmp(last, names[i]) == 0)
            return i + 1;
    return 0;
}

static int is_followed(int fd) { return fd >= 0 && fd < FDS && followed[fd]; }

static void put(int out, const void *data, size_t length) {
    const char *bytes = data;
    while (length > 0) {
        ssize_t done = REAL(write)(out, bytes, length);
        if (done <= 0)
            abort();
        bytes += done;
        length -= (size_t)done;
    }
}

static void record(unsigned char kind, int fd, uint64_t offset, const void *data, uint64_t length) {
    static int out = -1;
    if (out < 0) {
        const char *path = getenv("RECORD");
        int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))REAL(open);
        out = path ? real(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
        if (out < 0)
            abort();
    }
    unsigned char head[18] = {kind, (unsigned char)(followed[fd] - 1)};
    memcpy(head + 2, &offset, 8);
    memcpy(head + 10, &length, 8);
    put(out, head, sizeof head);
    if (data)
        put(out, data, length);
}

static int opened(int fd, const char *path) {
    if (fd >= 0 && fd < FDS)
        followed[fd] = (unsigned char)file_of(path);
    return fd;
}

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) {                                                   \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;                  \
        va_end(rest);                                                                              \
        return opened(REAL(name)(path, flags, mode), path);                                        \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    if (fd >= 0 && fd < FDS)
        followed[fd] = 0;
    return REAL(close)(fd);
}

ssize_t write(int fd, const void *data, size_t length) {
    if (!is_followed(fd))
        return REAL(write)(fd, data, length);
    pthread_mutex_lock(&order);
    off_t at = lseek(fd, 0, SEEK_CUR);
    ssize_t done = REAL(write)(fd, data, length);
    if (done > 0)
        record(WRITE, fd, (uint64_t)at, data, (uint64_t)done);
    pthread_mutex_unlock(&order);
    return done;
}

#define PWRITE(name, offset_type)                                                                  \
    ssize_t name(int fd, const void *data, size_t length, offset_type at) {                        \
        if (!is_followed(fd))                                                                      \
            return REAL(name)(fd, data, length, at);                                               \
        pthread_mutex_lock(&order);                                                                \
        ssize_t done = REAL(name)(fd, data, length, at);                                           \
        if (done > 0)                                                                              \
            record(WRITE, fd, (uint64_t)at, data, (uint64_t)done);                                 \
        pthread_mutex_unlock(&order);                                                              \
        return done;                                                                               \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define TRUNCATES(name, offset_type)                                                               \
    int name(int fd, offset_type length) {                                                         \
        if (!is_followed(fd))                                                                      \
            return REAL(name)(fd, length);                                                         \
        pthread_mutex_lock(&order);                                                                \
        int done = REAL(name)(fd, length);                                                         \
        if (done == 0)                                                                             \
            record(TRUNCATE, fd, (uint64_t)length, NULL, 0);                                       \
        pthread_mutex_unlock(&order);                                                              \
        return done;                                                                               \
    }
TRUNCATES(ftruncate, off_t)
TRUNCATES(ftruncate64, off64_t)

/* What was written before the call is on disk after it; what others write meanwhile may not be. */
#define SYNCS(name)                                                                                \
    int name(int fd) {                                                                             \
        if (!is_followed(fd))                                                                      \
            return REAL(name)(fd);                                                                 \
        pthread_mutex_lock(&order);                                                                \
        int done = REAL(name)(fd);                                                                 \
        if (done == 0)                                                                             \
            record(SYNC, fd, 0, NULL, 0);                                                          \
        pthread_mutex_unlock(&order);                                                              \
        return done;                                                                               \
    }
SYNCS(fsync)
SYNCS(fdatasync)
