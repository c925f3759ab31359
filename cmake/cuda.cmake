# Decides whether CUDA is built. Only the compiler and the static runtime are used: no CUDAToolkit
# package (NVIDIA's PyPI wheels do not satisfy it) and no libcuda, so the result imports anywhere.
set(OOMB_WITH_CUDA OFF)

if(NOT OOMB_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "OOMB_CUDA: expected auto, on or off, got ${OOMB_CUDA}")
endif()
if(OOMB_CUDA STREQUAL "off")
  message(STATUS "oomb: CUDA is off (OOMB_CUDA=off), building for the CPU")
else()
  oomb_ask_toolkit(OOMB_NVCC nvcc ${OOMB_CUDA})
  if(OOMB_NVCC)
    set(OOMB_WITH_CUDA ON)
  elseif(OOMB_CUDA STREQUAL "on")
    message(FATAL_ERROR "OOMB_CUDA=on: no nvcc on this machine and none from NVIDIA's PyPI packages; "
      "install them with: pip install -r requirements-cuda.txt")
  else()
    message(STATUS "oomb: no nvcc on this machine, building for the CPU (OOMB_CUDA=on installs one)")
  endif()
endif()

if(OOMB_WITH_CUDA)
  set(CMAKE_CUDA_COMPILER "${OOMB_NVCC}" CACHE FILEPATH "" FORCE)
  set(CMAKE_CUDA_ARCHITECTURES 80-real)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  oomb_ask_toolkit(OOMB_CUDA_LIBRARY_DIR library_dir "${OOMB_NVCC}")
  if(OOMB_CUDA_LIBRARY_DIR)
    set(CMAKE_CUDA_FLAGS_INIT "-L${OOMB_CUDA_LIBRARY_DIR}")
  endif()
  enable_language(CUDA)
  # One nvcc job of a large kernel takes up to 5 GB; more at once than fit would be killed.
  oomb_ask_toolkit(OOMB_CUDA_JOBS jobs)
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS cuda=${OOMB_CUDA_JOBS})
  message(STATUS "oomb: building CUDA with ${OOMB_NVCC} ${CMAKE_CUDA_COMPILER_VERSION}, "
    "${OOMB_CUDA_JOBS} job(s) at a time")
endif()
