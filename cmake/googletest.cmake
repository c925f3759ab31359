# oomb_gtest: an installed GoogleTest, else its sources as Debian's package lays them down, else the
# sources that scripts/get_googletest.py has fetched.
find_package(GTest QUIET)
add_library(oomb_gtest INTERFACE)
if(GTest_FOUND)
  target_link_libraries(oomb_gtest INTERFACE GTest::gtest GTest::gtest_main)
else()
  set(fetched "${PROJECT_SOURCE_DIR}/build/googletest/googletest")
  find_path(GTEST_SOURCE src/gtest-all.cc NO_DEFAULT_PATH
    PATHS /usr/src/googletest/googletest "${fetched}" "${fetched}/googletest")
  if(NOT GTEST_SOURCE)
    execute_process(COMMAND "${Python_EXECUTABLE}"
      "${PROJECT_SOURCE_DIR}/scripts/get_googletest.py" "${fetched}" COMMAND_ERROR_IS_FATAL ANY)
    find_path(GTEST_SOURCE src/gtest-all.cc NO_DEFAULT_PATH REQUIRED
      PATHS "${fetched}" "${fetched}/googletest")
  endif()
  message(STATUS "oomb: GoogleTest from ${GTEST_SOURCE}")
  # Built with our sanitizers, without our warnings.
  add_library(oomb_gtest_objects STATIC "${GTEST_SOURCE}/src/gtest-all.cc"
    "${GTEST_SOURCE}/src/gtest_main.cc")
  target_include_directories(oomb_gtest_objects SYSTEM PUBLIC "${GTEST_SOURCE}/include")
  target_include_directories(oomb_gtest_objects PRIVATE "${GTEST_SOURCE}")
  target_link_libraries(oomb_gtest_objects PUBLIC oomb_options)
  target_compile_options(oomb_gtest_objects PRIVATE -w)
  target_link_libraries(oomb_gtest INTERFACE oomb_gtest_objects)
endif()
