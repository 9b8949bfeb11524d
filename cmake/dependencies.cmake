# What the program links. A missing package is named as one installs it, all of them at once, as `pip install .` comes here too.
# Header-only fmt and the archive of yaml-cpp: the program needs the C and C++ run times alone and runs wherever it is copied to,
# out of a wheel or a package. (Debian has a compiled fmt as a shared library alone: see src/support/format.h.)
set(missing "")
foreach(dependency CLI11=libcli11-dev fmt=libfmt-dev nlohmann_json=nlohmann-json3-dev yaml-cpp=libyaml-cpp-dev)
  string(REPLACE "=" ";" dependency ${dependency})
  list(GET dependency 0 name)
  list(GET dependency 1 debian_package)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    string(APPEND missing " ${debian_package}")
  endif()
endforeach()
if(missing)
  message(FATAL_ERROR "the tileloss program is built with packages that are missing here. On Debian and Ubuntu install them with\n"
    "    apt-get install${missing}\n"
    "-DTILELOSS_BUILD_TOOLS=OFF (pip: -C cmake.define.TILELOSS_BUILD_TOOLS=OFF) builds the library without it.\n")
endif()

add_library(tileloss_yaml_cpp INTERFACE)
find_library(TILELOSS_YAML_CPP_ARCHIVE libyaml-cpp.a)
if(TILELOSS_YAML_CPP_ARCHIVE)
  target_include_directories(tileloss_yaml_cpp SYSTEM INTERFACE ${YAML_CPP_INCLUDE_DIR})
  target_link_libraries(tileloss_yaml_cpp INTERFACE ${TILELOSS_YAML_CPP_ARCHIVE})
else()
  target_link_libraries(tileloss_yaml_cpp INTERFACE yaml-cpp)
endif()
