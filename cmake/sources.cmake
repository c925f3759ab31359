# Targets follow the folders of csrc/ (design: bindings -> offload -> paging -> memory -> common and
# bindings -> attention -> common). A new file in a folder needs no edit here.
#
# File names decide how a unit is compiled:
#   *_avx2.cpp, *_avx512.cpp   with that instruction set; only on x86-64, called after a CPU check
#   *_cuda.cpp                 only when CUDA is built; may include <cuda_runtime.h>. So are all
#                              files in attention/{sm90,sm80,plain,pages,device}, but for their
#                              kernels.cpp, which say what there is
#   *.cu                       only when CUDA is built; in attention/sm90 for sm_90a, else portable
# OOMB_WITH_CUDA is 1 or 0 in every unit.

function(oomb_glob result)
  set(patterns)
  foreach(folder IN LISTS ARGN)
    list(APPEND patterns "${PROJECT_SOURCE_DIR}/csrc/${folder}")
  endforeach()
  file(GLOB_RECURSE files CONFIGURE_DEPENDS ${patterns})
  set(${result} "${files}" PARENT_SCOPE)
endfunction()

target_compile_definitions(oomb_options INTERFACE OOMB_WITH_CUDA=$<BOOL:${OOMB_WITH_CUDA}>)

# oomb_core: common, adapters, sums, memory, paging, offload, peers; oomb_attention: the kernels.
# Neither knows the other.
function(oomb_add_layer name)
  oomb_glob(sources ${ARGN})
  if(NOT OOMB_WITH_CUDA)
    set(declarations "${sources}")
    list(FILTER declarations INCLUDE REGEX "/attention/[a-z0-9]+/kernels\\.cpp$")
    list(FILTER sources EXCLUDE REGEX "_cuda\\.cpp$|/attention/(sm90|sm80|plain|pages|device)/")
    list(APPEND sources ${declarations})
  endif()
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
    list(FILTER sources EXCLUDE REGEX "_avx(2|512)\\.cpp$")
  endif()
  foreach(source IN LISTS sources)
    if(source MATCHES "_avx2\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma")
    elseif(source MATCHES "_avx512\\.cpp$")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS
        "-mavx512f;-mavx512dq;-mavx512bw;-mavx512vl;-mfma")
    endif()
  endforeach()
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC oomb_options)
endfunction()

oomb_add_layer(oomb_core common/*.cpp adapters/*.cpp sums/*.cpp memory/*.cpp paging/*.cpp
  offload/*.cpp peers/*.cpp)
oomb_add_layer(oomb_attention attention/*.cpp)
target_link_libraries(oomb_attention PUBLIC oomb_core)

if(OOMB_WITH_CUDA)
  # The runtime's headers for *_cuda.cpp.
  target_include_directories(oomb_options SYSTEM INTERFACE
    ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})

  # oomb_add_kernels(library name architectures patterns...): *.cu files that go into library
  function(oomb_add_kernels library name architectures)
    oomb_glob(kernels ${ARGN})
    if(NOT kernels)
      return()
    endif()
    add_library(${name} OBJECT ${kernels})
    foreach(architecture IN LISTS architectures)
      string(REGEX REPLACE "(.*)-real" "sm_\\1" architecture "${architecture}")
      string(REGEX REPLACE "(.*)-virtual" "compute_\\1" architecture "${architecture}")
      set_property(GLOBAL APPEND PROPERTY oomb_architectures "${architecture}")
    endforeach()
    set_target_properties(${name} PROPERTIES
      CUDA_ARCHITECTURES "${architectures}" JOB_POOL_COMPILE cuda)
    target_link_libraries(${name} PUBLIC oomb_options)
    target_compile_options(${name} PRIVATE --expt-relaxed-constexpr -lineinfo)
    if(OOMB_PTXAS_VERBOSE)
      target_compile_options(${name} PRIVATE -Xptxas=-v)
    endif()
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${name}>)
  endfunction()

  # sm_90a code (wgmma, TMA) has no forward compatibility, hence a library of its own. Portable
  # kernels run from sm_80 on, newer devices through PTX; the page operations are on every device's
  # path, so Hopper gets machine code for them instead of a compilation at first use.
  oomb_add_kernels(oomb_attention oomb_sm90 "90a-real" attention/sm90/*.cu)
  oomb_add_kernels(oomb_attention oomb_portable "80-real;80-virtual"
    attention/sm80/*.cu attention/plain/*.cu)
  oomb_add_kernels(oomb_attention oomb_pages "80-real;90-real;80-virtual" attention/pages/*.cu)
  oomb_add_kernels(oomb_core oomb_device "80-real;90-real;80-virtual"
    common/*.cu adapters/*.cu sums/*.cu memory/*.cu paging/*.cu offload/*.cu peers/*.cu)
  set_target_properties(oomb_core oomb_attention PROPERTIES LINKER_LANGUAGE CXX)
  target_link_directories(oomb_core PUBLIC ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}
    ${OOMB_CUDA_LIBRARY_DIR})
  target_link_libraries(oomb_core PUBLIC cudart_static rt ${CMAKE_DL_LIBS})
endif()
