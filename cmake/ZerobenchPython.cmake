# zerobench._core: the bindings and the few files that include torch. torch is linked by path, because
# find_package(Torch) of a CUDA build is fatal where no CUDA toolkit is.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/build_backend/torch_finder.py" ${ZEROBENCH_TORCH_DIR}
  OUTPUT_VARIABLE torch_facts ERROR_VARIABLE torch_error RESULT_VARIABLE torch_missing OUTPUT_STRIP_TRAILING_WHITESPACE)
if(torch_missing)
  message(FATAL_ERROR "torch was not found: install torch for ${Python_EXECUTABLE}, pass -DZEROBENCH_TORCH_DIR=, "
    "or build without the Python module by -DZEROBENCH_PYTHON=OFF. ${torch_error}")
endif()
foreach(fact directory version minor cuda)
  string(REGEX MATCH "(^|\n)${fact}=([^\n]*)" matched "${torch_facts}")
  set(ZEROBENCH_TORCH_${fact} "${CMAKE_MATCH_2}")
endforeach()
message(STATUS "zerobench: torch ${ZEROBENCH_TORCH_version} in ${ZEROBENCH_TORCH_directory}")

# The copy of pybind11 that torch itself was built with: it is always there, its path is stable (an isolated build
# environment's is not, and every rebuild would start from nothing), and our module shares torch's type registry.
set(ZEROBENCH_TORCH_INCLUDE "${ZEROBENCH_TORCH_directory}/include")
if(NOT EXISTS "${ZEROBENCH_TORCH_INCLUDE}/pybind11/pybind11.h")
  message(FATAL_ERROR "torch in ${ZEROBENCH_TORCH_directory} lacks include/pybind11: install torch again")
endif()

# The C++11 string ABI is the only one since torch 2.7.
set(ZEROBENCH_TORCH_CXX11_ABI 1)
# The version is on every command line, so that another torch in the same place compiles everything again.
add_library(zerobench_torch INTERFACE)
target_include_directories(zerobench_torch SYSTEM INTERFACE
  "${ZEROBENCH_TORCH_INCLUDE}" "${ZEROBENCH_TORCH_INCLUDE}/torch/csrc/api/include")
target_compile_definitions(zerobench_torch INTERFACE
  _GLIBCXX_USE_CXX11_ABI=${ZEROBENCH_TORCH_CXX11_ABI} USE_DISTRIBUTED USE_C10D_GLOO
  ZEROBENCH_TORCH_VERSION="${ZEROBENCH_TORCH_version}")
foreach(library torch_python torch torch_cpu c10)
  set(path "${ZEROBENCH_TORCH_directory}/lib/lib${library}.so")
  if(NOT EXISTS "${path}")
    message(FATAL_ERROR "torch in ${ZEROBENCH_TORCH_directory} lacks lib/lib${library}.so: install torch again")
  endif()
  target_link_libraries(zerobench_torch INTERFACE "${path}")
endforeach()

# No path of this machine goes into a module: torch's libraries are loaded by the time ours is.
function(zerobench_python_module target)
  zerobench_compile_options(${target})
  zerobench_unite_sources(${target})
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
  if(ZEROBENCH_IN_PLACE)
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/python/zerobench")
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION zerobench COMPONENT python)
endfunction()

file(GLOB ZEROBENCH_CORE_SOURCES CONFIGURE_DEPENDS
  csrc/comm/c10d*.cpp csrc/zero/torch_*.cpp csrc/bindings/*.cpp)
list(FILTER ZEROBENCH_CORE_SOURCES EXCLUDE REGEX "/cuda_[^/]*\\.cpp$")
Python_add_library(_core MODULE WITH_SOABI ${ZEROBENCH_CORE_SOURCES})
zerobench_python_module(_core)
target_link_libraries(_core PRIVATE zerobench_native zerobench_torch)

include(ZerobenchCuda)
include(ZerobenchBuildInfo)
