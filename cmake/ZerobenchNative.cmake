# zerobench_native: everything that knows neither torch nor Python, as one static library.

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(ZEROBENCH_ISA_OTHER "_neon\\.cpp$")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(ZEROBENCH_ISA_OTHER "_avx(2|512)\\.cpp$")
else()
  set(ZEROBENCH_ISA_OTHER "_(avx2|avx512|neon)\\.cpp$")
endif()

# Files that include torch's headers belong to zerobench._core, those that include CUDA's or NCCL's to zerobench._cuda.
set(ZEROBENCH_MODULE_SOURCES "/csrc/(comm/c10d|zero/torch_|comm/nccl_|[a-z]+/cuda_)[^/]*$")

file(GLOB ZEROBENCH_NATIVE_SOURCES CONFIGURE_DEPENDS
  csrc/common/*.cpp csrc/memory/*.cpp csrc/partition/*.cpp csrc/kernels/*.cpp csrc/optim/*.cpp csrc/io/*.cpp
  csrc/comm/*.cpp csrc/stores/*.cpp csrc/zero/*.cpp)
list(FILTER ZEROBENCH_NATIVE_SOURCES EXCLUDE REGEX "${ZEROBENCH_MODULE_SOURCES}")
list(FILTER ZEROBENCH_NATIVE_SOURCES EXCLUDE REGEX "${ZEROBENCH_ISA_OTHER}")

foreach(source IN LISTS ZEROBENCH_NATIVE_SOURCES)
  if(source MATCHES "_avx2\\.cpp$")
    set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  elseif(source MATCHES "_avx512\\.cpp$")
    set_source_files_properties("${source}" PROPERTIES
      COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx2;-mfma;-mf16c")
  endif()
endforeach()

add_library(zerobench_native STATIC ${ZEROBENCH_NATIVE_SOURCES})
zerobench_compile_options(zerobench_native)
zerobench_unite_sources(zerobench_native)
target_include_directories(zerobench_native PUBLIC "${PROJECT_SOURCE_DIR}/csrc")
target_link_libraries(zerobench_native PUBLIC Threads::Threads)
