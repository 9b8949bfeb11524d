#include "backends/cuda/library.h"

#include <dlfcn.h>
#include <tileloss/tileloss.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>

namespace tileloss::impl::cuda {
namespace {

constexpr const char* kName = "libtileloss_cuda.so";

void* open_library(std::string& missing) {
  Dl_info here = {};
  if (dladdr(reinterpret_cast<const void*>(&library), &here) != 0 && here.dli_fname != nullptr) {
    std::string path = here.dli_fname;
    // Of a program that was started through PATH this is its name alone.
    char program[PATH_MAX] = "";
    if (path.find('/') == std::string::npos && realpath("/proc/self/exe", program) != nullptr) path = program;
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    // The program, which contains the library, is installed in a folder beside lib.
    for (const char* const where : {"", "../lib/"}) {
      if (folder.empty()) break;
      const std::string file = folder + where + kName;
      if (void* const opened = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return opened;
      missing = dlerror();
      if (access(file.c_str(), F_OK) == 0) return nullptr;  // what is wrong with it is what to say
    }
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
