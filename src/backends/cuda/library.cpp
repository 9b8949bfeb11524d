#include "backends/cuda/library.h"

#include <dlfcn.h>
#include <tileloss/tileloss.h>
#include <unistd.h>

namespace tileloss::impl::cuda {
namespace {

constexpr const char* kName = "libtileloss_cuda.so";

void* open_library(std::string& missing) {
  Dl_info here = {};
  if (dladdr(reinterpret_cast<const void*>(&library), &here) != 0 && here.dli_fname != nullptr) {
    const std::string path = here.dli_fname;
    const std::string file = path.substr(0, path.rfind('/') + 1) + kName;
    if (void* const opened = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return opened;
    missing = dlerror();
    if (access(file.c_str(), F_OK) == 0) return nullptr;  // what is wrong with it is what to say
  }
  if (void* const opened = dlopen(kName, RTLD_NOW | RTLD_LOCAL)) return opened;
  missing = dlerror();
  return nullptr;
}

Library open_once() {
  Library l;
  void* const opened = open_library(l.missing);
  if (opened == nullptr) return l;
  auto* const entry = reinterpret_cast<EntryPoint*>(dlsym(opened, kEntryPoint));
  char missing[256] = "no entry point";
  if (entry != nullptr) l.backend = entry(TILELOSS_VERSION_STRING, missing, sizeof missing);
  if (l.backend == nullptr) l.missing = std::string(kName) + ": " + missing;
  return l;
}

}  // namespace

const Library& library() {
  static const Library opened = open_once();
  return opened;
}

}  // namespace tileloss::impl::cuda
