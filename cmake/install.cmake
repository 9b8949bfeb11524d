# What `cmake --install` puts where: libraries, headers, a CMake package, a pkg-config file. Everything is found from
# where it lies, so that the folder can be moved. CPack packs the same files (./dev package).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS tileloss tileloss_static EXPORT tileloss-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET tileloss_cuda)
  install(FILES ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/libtileloss_cuda.so DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tileloss DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/cmake/copyright DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET tileloss_judge)
  install(TARGETS tileloss_judge)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE-THIRD-PARTY DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tileloss)
install(EXPORT tileloss-targets NAMESPACE tileloss:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tileloss-config.cmake.in ${PROJECT_BINARY_DIR}/tileloss-config.cmake
  INSTALL_DESTINATION ${package_dir})
# Before 1.0 a new minor version may break what the one before it promised.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tileloss-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tileloss-config.cmake ${PROJECT_BINARY_DIR}/tileloss-config-version.cmake
  DESTINATION ${package_dir})

file(RELATIVE_PATH TILELOSS_PC_UP ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/+$" "" TILELOSS_PC_UP "${TILELOSS_PC_UP}")
file(RELATIVE_PATH TILELOSS_PC_LIBDIR ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH TILELOSS_PC_INCLUDEDIR ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
configure_file(${PROJECT_SOURCE_DIR}/cmake/tileloss.pc.in ${PROJECT_BINARY_DIR}/tileloss.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tileloss.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
string(CONCAT CPACK_PACKAGE_DESCRIPTION
  "Cross-entropy, log-probabilities and policy losses from the logits of a language model, with gradients,\n"
  "in one pass over the vocabulary and without scratch of its size: a library with C and C++ headers, and\n"
  "the one that checks its kernels against a double-precision oracle and times them, for tileloss's Python package.")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "the TileLoss contributors")
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
include(CPack)
