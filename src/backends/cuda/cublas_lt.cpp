#include "backends/cuda/cublas_lt.h"

#include <dlfcn.h>

#include <cstdlib>

namespace tileloss::impl::cuda {
namespace {

// The newest first, with the folder that the Python package of that version has under nvidia/.
struct Version {
  const char* name;
  const char* folder;
};
constexpr Version kVersions[] = {{"libcublasLt.so.13", "cu13"}, {"libcublasLt.so.12", "cublas"}};

// Of the library that holds this function: the folders above it, where "nvidia" may lie.
std::string folder_of_this() {
  Dl_info here = {};
  if (dladdr(reinterpret_cast<const void*>(&cublas_lt), &here) == 0 || here.dli_fname == nullptr) return {};
  return here.dli_fname;
}

void* open_library() {
  if (const char* const named = std::getenv("TILELOSS_CUBLASLT"); named != nullptr && *named != '\0')
    return dlopen(named, RTLD_NOW | RTLD_LOCAL);
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const Version& version : kVersions) {
      if (void* const opened = dlopen(version.name, flags)) return opened;
    }
  }
  std::string folder = folder_of_this();
  while (true) {
    const std::size_t end = folder.rfind('/');
    if (end == std::string::npos || end == 0) break;
    folder.resize(end);
    for (const Version& version : kVersions) {
      const std::string path = folder + "/nvidia/" + version.folder + "/lib/" + version.name;
      if (void* const opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return opened;
    }
  }
  return dlopen(kVersions[0].name, RTLD_NOW | RTLD_LOCAL);  // for its message
}

CublasLt open_once() {
  CublasLt lt = {};
  void* const opened = open_library();
  if (opened == nullptr) {
    const char* const message = dlerror();
    lt.missing = message != nullptr ? message : kVersions[0].name;
    return lt;
  }
  for_each_function(lt, [&](const char* name, auto& function) {
    void* const found = dlsym(opened, name);
    if (found == nullptr && lt.missing.empty()) lt.missing = std::string("it has no ") + name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  });
  Dl_info where = {};
  if (lt.create != nullptr && dladdr(reinterpret_cast<const void*>(lt.create), &where) != 0 && where.dli_fname != nullptr)
    lt.path = where.dli_fname;
  return lt;
}

}  // namespace

const CublasLt& cublas_lt() {
  static const CublasLt opened = open_once();
  return opened;
}

}  // namespace tileloss::impl::cuda
