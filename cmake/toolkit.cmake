# oomb_ask_toolkit(result question arguments...): what cmake/toolkit.py answers
function(oomb_ask_toolkit result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/toolkit.py" ${ARGN}
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()
