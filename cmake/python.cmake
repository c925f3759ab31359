# The extension module oomb._C: every file of csrc/bindings over oomb_core.
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "oomb: no Python headers for ${Python_EXECUTABLE}")
endif()
if(NOT pybind11_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 2.13 CONFIG REQUIRED)

file(GLOB binding_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/bindings/*.cpp")
get_property(architectures GLOBAL PROPERTY oomb_architectures)
list(REMOVE_DUPLICATES architectures)
list(JOIN architectures " " architectures)
pybind11_add_module(_C MODULE NO_EXTRAS ${binding_sources})
target_link_libraries(_C PRIVATE oomb_core)
target_compile_definitions(_C PRIVATE
  OOMB_VERSION="${OOMB_VERSION}"
  OOMB_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  OOMB_BUILD_TYPE="${CMAKE_BUILD_TYPE}"
  OOMB_CUDA_COMPILER="${CMAKE_CUDA_COMPILER_VERSION}"
  OOMB_CUDA_ARCHITECTURES="${architectures}")
# A domain is bound once its file has landed.
foreach(domain attention paging)
  if(EXISTS "${PROJECT_SOURCE_DIR}/csrc/bindings/${domain}.cpp")
    string(TOUPPER "${domain}" upper)
    target_compile_definitions(_C PRIVATE OOMB_BIND_${upper})
  endif()
endforeach()
set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${OOMB_PYTHON_OUTPUT_DIR}")
