# Cross compilation for 64-bit ARM with Debian's g++-aarch64-linux-gnu; what is built runs under qemu-user. The tests
# link arm64's fmt and GoogleTest, which ./dev unpacks into TILELOSS_ARM64.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
if(DEFINED ENV{XDG_CACHE_HOME})
  set(TILELOSS_ARM64 $ENV{XDG_CACHE_HOME}/tileloss/arm64)
else()
  set(TILELOSS_ARM64 $ENV{HOME}/.cache/tileloss/arm64)
endif()
list(APPEND CMAKE_PREFIX_PATH ${TILELOSS_ARM64}/usr)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
