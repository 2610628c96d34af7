/* Fails allocations of at least `least` bytes while `on` is set. A test preloads it into a service and sets both in a
   shared file. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct control {
  volatile long on, least, failed;
};

static struct control none, *control = &none;

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);

__attribute__((constructor)) static void share(void) {
  const char *name = getenv("SHORTAGE_CONTROL");
  int file = name ? open(name, O_RDWR) : -1;
  if (file < 0) return;
  void *shared = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared != MAP_FAILED) control = shared;
}

static int fails(size_t size) {
  if (!control->on || (long)size < control->least) return 0;
  __sync_fetch_and_add(&control->failed, 1);
  errno = ENOMEM;
  return 1;
}

void *malloc(size_t size) { return fails(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return fails(count * size) ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return fails(size) ? NULL : __libc_realloc(old, size); }
void *memalign(size_t align, size_t size) { return fails(size) ? NULL : __libc_memalign(align, size); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }

int posix_memalign(void **found, size_t align, size_t size) {
  void *memory = memalign(align, size);
  if (!memory) return ENOMEM;
  *found = memory;
  return 0;
}
