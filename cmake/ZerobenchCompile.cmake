# Language, warnings, sanitizers and compiler cache: what every target shares.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(ZEROBENCH_CCACHE ccache)
if(ZEROBENCH_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${ZEROBENCH_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${ZEROBENCH_CCACHE}")
endif()

if(ZEROBENCH_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${ZEROBENCH_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options("-fsanitize=${ZEROBENCH_SANITIZE}")
endif()

find_package(Threads REQUIRED)

# No contraction anywhere: an fma happens exactly where the source writes one
# (docs/decisions/0001-one-sequence-for-adam.md).
function(zerobench_compile_options target)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-Wall;-Wextra;-Wpedantic;-Wshadow>"
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${ZEROBENCH_WERROR}>>:-Werror>")
endfunction()

# Most of the time of a first build goes into headers that many files include: groups of files read them once.
function(zerobench_unite_sources target)
  if(ZEROBENCH_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  endif()
endfunction()
