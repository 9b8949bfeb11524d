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

// Of the library that holds this function.
std::string path_of_this() {
  Dl_info here = {};
  const bool is_known = dladdr(reinterpret_cast<const void*>(&cublas_lt), &here) != 0 && here.dli_fname != nullptr;
  return is_known ? here.dli_fname : "";
}

// `path`: what was tried last.
void* open_library(std::string& path) {
  const auto open = [&](std::string name, int flags) {
    path = std::move(name);
    return dlopen(path.c_str(), flags | RTLD_NOW | RTLD_LOCAL);
  };
  if (const char* const named = std::getenv("TILELOSS_CUBLASLT"); named != nullptr && *named != '\0') return open(named, 0);
  for (const int flags : {RTLD_NOLOAD, 0}) {
    for (const Version& version : kVersions) {
      if (void* const opened = open(version.name, flags)) return opened;
    }
  }
  std::string folder = path_of_this();
  for (std::size_t end = folder.rfind('/'); end != std::string::npos && end > 0; end = folder.rfind('/')) {
    folder.resize(end);
    for (const Version& version : kVersions) {
      if (void* const opened = open(folder + "/nvidia/" + version.folder + "/lib/" + version.name, 0)) return opened;
    }
  }
  return open(kVersions[0].name, 0);  // for its message
}

CublasLt open_once() {
  CublasLt lt = {};
  void* const opened = open_library(lt.path);
  if (opened == nullptr) {
    const char* const message = dlerror();
    lt.missing = message != nullptr ? message : lt.path;
    return lt;
  }
  for_each_function(lt, [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(opened, name));
    if (function == nullptr && lt.missing.empty()) lt.missing = lt.path + " has no " + name;
  });
  return lt;
}

}  // namespace

const CublasLt& cublas_lt() {
  static const CublasLt opened = open_once();
  return opened;
}

}  // namespace tileloss::impl::cuda
