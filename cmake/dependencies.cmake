# What the tools link, both as headers alone. A missing package is named as one installs it, all of them at once, as `pip install .`
# comes here too. Header-only fmt: libtileloss_judge.so needs the C and C++ run times alone and runs wherever it is copied to, out
# of a wheel or a package. (Debian has a compiled fmt as a shared library alone: see src/support/format.h.)
set(missing "")
foreach(dependency fmt=libfmt-dev nlohmann_json=nlohmann-json3-dev)
  string(REPLACE "=" ";" dependency ${dependency})
  list(GET dependency 0 name)
  list(GET dependency 1 debian_package)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    string(APPEND missing " ${debian_package}")
  endif()
endforeach()
if(missing)
  message(FATAL_ERROR "TileLoss's tools are built with packages that are missing here. On Debian and Ubuntu install them with\n"
    "    apt-get install${missing}\n"
    "-DTILELOSS_BUILD_TOOLS=OFF (pip: -C cmake.define.TILELOSS_BUILD_TOOLS=OFF) builds the library without them.\n")
endif()
