/* A file system that is slow or full, for paths that contain $FAULT_PATH: preloaded into the processes of a run.
   What to do is read at each call from the file $FAULT_ORDERS, so that a fault can begin and end while the run goes on:
   "slow MILLISECONDS" delays fsync, "full" makes writes fail as a full disk does, "readonly" as a read-only one, "" nothing.
   "clock SECONDS" moves the wall clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long order(const char *word) { /* -1: not ordered; else its number */
  const char *file = getenv("FAULT_ORDERS");
  if (!file) return -1;
  static int (*real_open)(const char *, int, ...);
  if (!real_open) real_open = dlsym(RTLD_NEXT, "open");
  char text[64] = {0};
  int fd = real_open(file, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0 || strncmp(text, word, strlen(word))) return -1;
  return atol(text + strlen(word));
}

static int ours(int fd) {
  const char *part = getenv("FAULT_PATH");
  char link[64], path[4096];
  if (!part) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return strstr(path, part) != NULL;
}

static int refused(int fd) {
  if (fd < 3 || !ours(fd)) return 0;
  if (order("full") >= 0) { errno = ENOSPC; return 1; }
  if (order("readonly") >= 0) { errno = EROFS; return 1; }
  return 0;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) { REAL(write); return refused(fd) ? -1 : real(fd, data, size); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(writev); return refused(fd) ? -1 : real(fd, v, n); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t at) { REAL(pwrite64); return refused(fd) ? -1 : real(fd, d, n, at); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); return refused(fd) ? -1 : real(fd, n); }
int posix_fallocate64(int fd, off64_t at, off64_t n) { REAL(posix_fallocate64); return refused(fd) ? errno : real(fd, at, n); }

static void wait_if_slow(int fd) {
  long ms = ours(fd) ? order("slow ") : -1;
  if (ms > 0) { struct timespec t = {ms / 1000, ms % 1000 * 1000000}; nanosleep(&t, NULL); }
}

int fsync(int fd) { REAL(fsync); wait_if_slow(fd); return refused(fd) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); wait_if_slow(fd); return refused(fd) ? -1 : real(fd); }

int clock_gettime(clockid_t id, struct timespec *t) {
  REAL(clock_gettime);
  int code = real(id, t);
  long shift = id == CLOCK_REALTIME ? order("clock ") : -1;
  if (shift > 0) t->tv_sec += shift;
  return code;
}
