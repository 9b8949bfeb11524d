// What the static libraries of GCC 12 as Debian builds it call of a glibc newer than 2.28, made of what 2.28 has.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

// 2.32. Zero is always right: whoever asks may only save a lock.
char __libc_single_threaded = 0;

// 2.33: before, these were inline and called functions that take the version of the struct, which is the kernel's own.
#ifdef __x86_64__
enum { kStatVersion = 1 };
#else
enum { kStatVersion = 0 };
#endif
int __xstat(int version, const char* path, struct stat* found);
int __lxstat(int version, const char* path, struct stat* found);
int __fxstat(int version, int file, struct stat* found);
int stat(const char* path, struct stat* found) { return __xstat(kStatVersion, path, found); }
int lstat(const char* path, struct stat* found) { return __lxstat(kStatVersion, path, found); }
int fstat(int file, struct stat* found) { return __fxstat(kStatVersion, file, found); }
int fstat64(int file, struct stat64* found) { return __fxstat(kStatVersion, file, (struct stat*)found); }

// 2.36. It cannot say that it failed.
uint32_t arc4random(void) {
  uint32_t number = 0;
  if (getentropy(&number, sizeof number) != 0) abort();
  return number;
}

// 2.35: the unwinder's table of the loaded object that has `address`. Of the result the unwinder reads dlfo_eh_frame alone.
struct search {
  uintptr_t address;
  struct dl_find_object* found;
};

static int find_in(struct dl_phdr_info* object, size_t size, void* data) {
  (void)size;
  const struct search* const search = data;
  void* frames = NULL;
  int has_address = 0;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)* const part = &object->dlpi_phdr[i];
    const uintptr_t start = object->dlpi_addr + part->p_vaddr;
    if (part->p_type == PT_GNU_EH_FRAME) frames = (void*)start;
    if (part->p_type == PT_LOAD && search->address - start < part->p_memsz) has_address = 1;
  }
  if (!has_address) return 0;
  search->found->dlfo_eh_frame = frames;
  return frames != NULL ? 1 : -1;
}

int _dl_find_object(void* address, struct dl_find_object* found) {
  struct search search = {(uintptr_t)address, found};
  return dl_iterate_phdr(find_in, &search) == 1 ? 0 : -1;
}
