# What goes into the Python wheel beside the package's own files (scikit-build-core, pyproject.toml): the library and the program,
# inside the package. A wheel has no symbolic links, so the library is one file without a version in its name.
set_property(TARGET tileloss PROPERTY VERSION)
set_property(TARGET tileloss PROPERTY SOVERSION)
install(TARGETS tileloss LIBRARY DESTINATION tileloss/lib)
if(TARGET tileloss_xla)
  install(TARGETS tileloss_xla LIBRARY DESTINATION tileloss/lib)
endif()
if(TARGET tileloss_program)
  install(TARGETS tileloss_program RUNTIME DESTINATION tileloss/bin)
endif()
if(TARGET tileloss_cuda)
  install(FILES ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/libtileloss_cuda.so DESTINATION tileloss/lib)
endif()
