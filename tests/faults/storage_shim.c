/* Fails chosen calls that write below a folder: preloaded into a stage by tests.faults.storage. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* shared by all processes; `Control` of storage_shim.py has the same fields */
struct control {
    long calls;       /* so far */
    long first, last; /* calls that fail, counted from 1 */
    long number;      /* errno */
    char root[1024];  /* calls elsewhere do not count */
    char failed[1024];
};
static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("STORAGE_FAULTS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(0, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) control = mapped;
}

static int fails(const char *call, int folder, const char *path) {
    char whole[2 * PATH_MAX], link[64];
    if (!control || !control->root[0]) return 0;
    whole[0] = 0;
    if (!path || path[0] != '/') { /* relative to a folder, or a descriptor itself */
        int saved = errno;
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, whole, PATH_MAX - 1);
        errno = saved;
        if (size < 0) return 0;
        whole[size] = 0;
    }
    if (path) {
        strcat(whole, "/");
        strncat(whole, path[0] == '/' ? path + 1 : path, PATH_MAX - 1);
    }
    size_t size = strlen(control->root);
    if (strncmp(whole, control->root, size) || whole[size] != '/') return 0;
    long n = __atomic_add_fetch(&control->calls, 1, __ATOMIC_SEQ_CST);
    if (n < control->first || n > control->last) return 0;
    if (n == control->first)
        snprintf(control->failed, sizeof control->failed, "%s %.900s", call, whole + size + 1);
    errno = (int)control->number;
    return 1;
}

#define WRITES(flags) (((flags) & O_ACCMODE) != O_RDONLY)
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE                                             \
    va_list more;                                        \
    va_start(more, flags);                               \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more)
#define FAIL(call, folder, path) \
    if (fails(call, folder, path)) return -1

#define OPEN(name)                                                \
    int name(const char *path, int flags, ...) {                  \
        MODE;                                                     \
        if (WRITES(flags)) { FAIL("open", AT_FDCWD, path); }      \
        return REAL(name)(path, flags, mode);                     \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                              \
    int name(int folder, const char *path, int flags, ...) {      \
        MODE;                                                     \
        if (WRITES(flags)) { FAIL("open", folder, path); }        \
        return REAL(name)(folder, path, flags, mode);             \
    }
OPENAT(openat)
OPENAT(openat64)
#define FOPEN(name)                                               \
    FILE *name(const char *path, const char *mode) {              \
        if (strpbrk(mode, "wa+") && fails("open", AT_FDCWD, path)) return 0; \
        return REAL(name)(path, mode);                            \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define ON_FILE(result, name, call, parameters, arguments)        \
    result name parameters {                                      \
        FAIL(call, file, 0);                                      \
        return REAL(name) arguments;                              \
    }
ON_FILE(ssize_t, write, "write", (int file, const void *from, size_t n), (file, from, n))
ON_FILE(ssize_t, pwrite, "write", (int file, const void *from, size_t n, off_t at), (file, from, n, at))
ON_FILE(ssize_t, pwrite64, "write", (int file, const void *from, size_t n, off64_t at), (file, from, n, at))
ON_FILE(ssize_t, writev, "write", (int file, const struct iovec *from, int n), (file, from, n))
ON_FILE(int, fsync, "fsync", (int file), (file))
ON_FILE(int, fdatasync, "fsync", (int file), (file))
ON_FILE(int, ftruncate, "truncate", (int file, off_t size), (file, size))
ON_FILE(int, ftruncate64, "truncate", (int file, off64_t size), (file, size))
ON_FILE(ssize_t, sendfile, "write", (int file, int from, off_t *at, size_t n), (file, from, at, n))
ON_FILE(ssize_t, sendfile64, "write", (int file, int from, off64_t *at, size_t n), (file, from, at, n))

#define TO_PATH(name, call, folder, path, parameters, arguments)  \
    int name parameters {                                         \
        FAIL(call, folder, path);                                 \
        return REAL(name) arguments;                              \
    }
TO_PATH(rename, "rename", AT_FDCWD, to, (const char *from, const char *to), (from, to))
TO_PATH(renameat, "rename", there, to, (int here, const char *from, int there, const char *to), (here, from, there, to))
TO_PATH(renameat2, "rename", there, to, (int here, const char *from, int there, const char *to, unsigned flags), (here, from, there, to, flags))
TO_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
TO_PATH(mkdirat, "mkdir", folder, path, (int folder, const char *path, mode_t mode), (folder, path, mode))
TO_PATH(link, "link", AT_FDCWD, to, (const char *from, const char *to), (from, to))
