# oomb_options carries what every target of ours is compiled with.
#
# Never -ffast-math: sums must not be reordered, and -inf is a legal LSE.
add_library(oomb_options INTERFACE)
target_include_directories(oomb_options INTERFACE "${PROJECT_SOURCE_DIR}/csrc")
target_link_libraries(oomb_options INTERFACE Threads::Threads)
target_compile_options(oomb_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -fno-math-errno>

  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)
if(OOMB_WERROR)
  target_compile_options(oomb_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

foreach(sanitizer IN LISTS OOMB_SANITIZE)
  target_compile_options(oomb_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizer} -fno-omit-frame-pointer>)
  target_link_options(oomb_options INTERFACE -fsanitize=${sanitizer})
endforeach()
if("undefined" IN_LIST OOMB_SANITIZE)
  target_compile_options(oomb_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
endif()

# A compiler cache is used where one is installed.
find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE}")
endif()
