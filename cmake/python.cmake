# The extension module oomb._C: every file of csrc/bindings over oomb_core.
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "oomb: no Python headers for ${Python_EXECUTABLE}")
endif()
oomb_ask_toolkit(pybind11_include pybind11_include)
if(NOT pybind11_include)
  message(FATAL_ERROR "oomb: no pybind11 headers: pip install pybind11")
endif()

file(GLOB binding_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/bindings/*.cpp")
get_property(architectures GLOBAL PROPERTY oomb_architectures)
list(REMOVE_DUPLICATES architectures)
list(JOIN architectures " " architectures)
Python_add_library(_C MODULE WITH_SOABI ${binding_sources})
target_include_directories(_C SYSTEM PRIVATE "${pybind11_include}")
target_link_libraries(_C PRIVATE oomb_core oomb_attention)
target_precompile_headers(_C PRIVATE <pybind11/pybind11.h> <pybind11/stl.h>)
# Some compilers link libstdc++ statically. Its symbols must not mix with those of the libstdc++ that
# torch has loaded: streams of one would use locales of the other.
target_link_options(_C PRIVATE LINKER:--exclude-libs,ALL)
target_compile_definitions(_C PRIVATE
  OOMB_VERSION="${OOMB_VERSION}"
  OOMB_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  OOMB_BUILD_TYPE="${CMAKE_BUILD_TYPE}"
  OOMB_CUDA_COMPILER="${CMAKE_CUDA_COMPILER_VERSION}"
  OOMB_CUDA_ARCHITECTURES="${architectures}")
set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${OOMB_PYTHON_OUTPUT_DIR}")
